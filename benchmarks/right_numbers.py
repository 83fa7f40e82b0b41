"""Compare Ringmaster with other trainers on numbers that some trainers silently get wrong, on CPUs.

    pip install accelerate lightning transformers peft
    python -m benchmarks.right_numbers [gradient] [accuracy] [loss] [adapters]

The model has two parameters, the logits of every sample, so that the right values are known. The exit status
is 1 if one of Ringmaster's values is wrong.
"""

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests import runs
from tests.ranks import run_ranks
from trainer import load_model
from trainer.report.run_hash import parameters_sha256

LABELS = {  # -100 is ignored
    "gradient": [
        0,
        *[-100] * 9,
        *[1] * 9,
        -100,
    ],  # half for each rank: one counted label, and nine
    "accuracy": [0, *[1] * 8],  # an odd number for two ranks
    "loss": [0, *[-100] * 4, *[1] * 5],  # a batch with one counted label, and one with five
}
OVERRIDES = [
    *("data=own", "data.dataset._target_=benchmarks.right_numbers.Samples", "train.global_batch_size=20"),
    *("data.task._target_=trainer.tasks.Classification", "train.max_steps=1", "schedule=constant"),
    *("model=own", "optim=sgd", "optim.momentum=0", "optim.weight_decay=0"),
]


class Logits(nn.Module):
    """(B, ...) -> (B, 2), the same for each sample; given labels, also their mean loss, for transformers."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(2) if what == "gradient" else torch.tensor([-1.0, 1.0]))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.logits.expand(len(x), 2)
        return logits if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Samples(list[Any]):
    num_classes = 2

    def __init__(self, split: str, what: str) -> None:
        labels = LABELS["gradient" if split == "train" else what]
        super().__init__((torch.ones(1), torch.tensor(label)) for label in labels)


def loader(what: str, **more: Any) -> DataLoader[Any]:
    """Return a loader of this rank's half of the training samples, or of all samples in batches of 5."""
    begin = 10 * int(os.environ["RANK"]) if what == "gradient" else 0
    return DataLoader(Samples("eval", what)[begin : begin + 10], 10 if what == "gradient" else 5, **more)


def accelerate(what: str, gather: str = "gather") -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    wrapped = accelerator.prepare(model := Logits(what))
    all_of, right = getattr(accelerator, gather), []
    for x, labels in loader(what) if what == "gradient" else accelerator.prepare(loader(what)):
        accelerator.backward(F.cross_entropy(wrapped(x), labels))
        right.append(all_of(labels.eq(wrapped(x).argmax(1)).float()))
    return float(model.logits.grad[0] if what == "gradient" else torch.cat(right).mean())  # type: ignore[index]


def accelerate_gather_for_metrics(what: str) -> float:
    return accelerate(what, "gather_for_metrics")


def lightning(what: str) -> float:
    import lightning as L

    class Module(L.LightningModule):
        def training_step(self, batch: Any, _: int) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def validation_step(self, batch: Any, _: int) -> None:
            logits, labels = self.model(batch[0]), batch[1]
            right = labels.eq(logits.argmax(1)).float().mean()
            found = {"loss": F.cross_entropy(logits, labels), "accuracy": right}
            self.log_dict(found, sync_dist=True, batch_size=len(labels))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1.0)

    (module := Module()).model = Logits(what)
    options = {"logger": False, "enable_checkpointing": False, "use_distributed_sampler": what != "gradient"}
    world = int(os.environ["WORLD_SIZE"])
    runner = L.Trainer(accelerator="cpu", devices=world, strategy="ddp", max_steps=1, **options)
    if what != "gradient":
        return float(runner.validate(module, loader(what), verbose=False)[0][what])
    runner.fit(module, loader(what))
    return -module.model.logits.tolist()[0]


def transformers(what: str) -> float:
    from transformers import Trainer, TrainingArguments

    def collate(samples: list[Any]) -> dict[str, Tensor]:
        return dict(zip(("x", "labels"), map(torch.stack, zip(*samples, strict=True)), strict=True))

    sgd = torch.optim.SGD((model := Logits(what)).parameters(), 1.0)
    options: dict[str, Any] = {"use_cpu": True, "report_to": "none", "per_device_eval_batch_size": 5}
    arguments = TrainingArguments(os.environ["FOLDER"], max_steps=1, **options)
    runner = Trainer(model, arguments, collate, Samples("train", what), optimizers=(sgd, None))
    if what == "loss":
        return float(runner.evaluate(Samples("eval", what))["eval_loss"])
    runner.get_train_dataloader = lambda: loader(what, collate_fn=collate)
    runner.train()
    return -model.logits.tolist()[0]


def ringmaster(what: str) -> float:
    words = ["model._target_=benchmarks.right_numbers.Logits", f"+model.what={what}"]
    words += [f"optim.lr={1 if what == 'gradient' else 1e-12}", f"+data.dataset.what={what}"]
    result = runs.train(*OVERRIDES, *words, "strategy=ddp", f"run_dir={(folder := os.environ['FOLDER'])}")
    return -load_model(folder).logits.tolist()[0] if what == "gradient" else float(result[f"eval/{what}"])


def adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    layers: Any = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 2))
    return get_peft_model(layers, LoraConfig(r=2, target_modules=["0", "1"]))


def accelerate_adapters(what: str) -> float:
    from accelerate import Accelerator
    from accelerate.utils import save_fsdp_model

    accelerator, model = Accelerator(cpu=True), adapted()
    num_trainable = sum(each.numel() for each in model.parameters() if each.requires_grad)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    plugin = SimpleNamespace(fsdp_version=2, state_dict_type=StateDictType.FULL_STATE_DICT)
    plugin.state_dict_config = SimpleNamespace()
    save_fsdp_model(plugin, accelerator, model, folder := os.environ["FOLDER"], adapter_only=True)
    dist.barrier()
    saved = torch.load(f"{folder}/pytorch_model_fsdp.bin", weights_only=False).values()
    return sum(getattr(each, "_local_tensor", each).numel() for each in saved) / num_trainable


def ringmaster_adapters(what: str) -> float:
    folder = os.environ["FOLDER"]
    torch.save(adapted().state_dict(), f"{folder}/base{os.environ['RANK']}.pt")
    words = ["model._target_=benchmarks.right_numbers.adapted", f"model.init_from={folder}/base0.pt"]
    words += ["+data.dataset.what=accuracy", "optim.lr=0.1", "strategy=fsdp", f"run_dir={folder}/run"]
    result = runs.train(*OVERRIDES, *words)
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1
    )  # parameters_sha256 requires a process group
    return float(parameters_sha256(load_model(f"{folder}/run")) == result["param_sha256"])


# Loss: (ln(1 + e^2) + 5 ln(1 + e^-2)) / 6. Adapters: the fraction of parameters that is saved.
RIGHT = {"gradient": 0.4, "accuracy": 8 / 9, "loss": 0.460261, "adapters": 1.0}
TRAINERS: dict[str, list[Callable[[str], float]]] = {
    "gradient": [accelerate, lightning, transformers, ringmaster],
    "accuracy": [accelerate, accelerate_gather_for_metrics, lightning, ringmaster],
    "loss": [lightning, transformers, ringmaster],
    "adapters": [accelerate_adapters, ringmaster_adapters],
}


def silent(trainer: Callable[[str], float], what: str) -> float:
    with contextlib.redirect_stdout(io.StringIO()):
        return trainer(what)


def main() -> None:
    is_ringmaster_right = True
    for what, trainers in TRAINERS.items():
        for trainer in trainers if what in (sys.argv[1:] or TRAINERS) else ():
            # Without a variable of torchrun, Lightning would start its own ranks.
            variables = {"TORCHELASTIC_RUN_ID": "right-numbers", "FOLDER": tempfile.mkdtemp()}
            number = run_ranks(silent, 1 if what == "loss" else 2, trainer, what, init=False, env=variables)[
                0
            ]
            is_right = abs(number - RIGHT[what]) < 1e-5
            package = trainer.__name__.partition("_")[0]
            is_ringmaster_right &= is_right or package != "ringmaster"
            words = (
                f"{trainer.__name__.replace('_', ' ')} {version(package) if package != 'ringmaster' else ''}"
            )
            print(f"{what}: {abs(number):.4f} {'right' if is_right else 'WRONG'} in {words}", flush=True)
    sys.exit(not is_ringmaster_right)


if __name__ == "__main__":
    main()
