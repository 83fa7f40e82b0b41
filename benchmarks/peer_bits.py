"""Count the different hashes of the same training on 1, 2 and 4 processes, for several trainers.

    pip install accelerate lightning
    python -m benchmarks.peer_bits

Plain DDP, Accelerate, Lightning and Ringmaster train an MLP on the digits for 60 steps of SGD with a global
batch size of 64. The samples of each step are the same for all trainers and numbers of processes. Ringmaster
uses train.exact=8. The exit status is 1 if Ringmaster's hashes differ.
"""

import contextlib
import hashlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from models.mlp import MLP
from tests import runs
from tests.ranks import run_ranks
from trainer.data.digits import Digits

STEPS, BATCH, WORLDS = 60, 64, (1, 2, 4)


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[Any]]:
    """Return the same model in each process, its optimizer, and this rank's part of each batch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, data = MLP((1, 8, 8), 10), Digits("train")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    order = torch.randint(len(data), (STEPS, BATCH), generator=torch.Generator().manual_seed(0))
    batches = (data.__getitems__(batch[rank::world].tolist()) for batch in order)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), batches


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Any],
    backward: Callable[[Tensor], Any],
) -> None:
    for inputs, targets in batches:
        optimizer.zero_grad()
        backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()


def sha256(model: nn.Module) -> str:
    weights = (parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(b"".join(weights)).hexdigest()


def ddp() -> str:
    model, optimizer, batches = parts()
    dist.init_process_group("gloo")
    loop(DistributedDataParallel(model), optimizer, batches, Tensor.backward)
    return sha256(model)


def accelerate() -> str:
    from accelerate import Accelerator

    model, optimizer, batches = parts()
    accelerator = Accelerator(cpu=True)
    loop(*accelerator.prepare(model, optimizer), batches, accelerator.backward)
    return sha256(model)


def lightning() -> str:
    import lightning as L

    model, optimizer, batches = parts()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    world = int(os.environ["WORLD_SIZE"])
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: dict[str, Any] = dict.fromkeys(names, False)
    strategy = "ddp" if world > 1 else "auto"
    runner = L.Trainer(accelerator="cpu", devices=world, strategy=strategy, max_steps=STEPS, **quiet)
    runner.fit(Module(), DataLoader(list(batches), batch_size=None))
    return sha256(model)


def ringmaster() -> str:
    strategy = "ddp" if int(os.environ["WORLD_SIZE"]) > 1 else "single"
    words = [
        "train.exact=8",
        f"strategy={strategy}",
        f"train.global_batch_size={BATCH}",
        f"train.max_steps={STEPS}",
    ]
    words += ["train.eval_every_epochs=0", f"run_dir={os.environ['RUN_DIR']}"]
    return str(runs.train(*words)["param_sha256"])


def silent(trainer: Callable[[], str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()):
        return trainer()


def main() -> None:
    print(f"{'':10} {'hashes':>6}  " + "  ".join(f"{world:<8}" for world in WORLDS))
    for trainer in (ddp, accelerate, lightning, ringmaster):
        found = []
        for world in WORLDS:
            with tempfile.TemporaryDirectory() as folder:
                # Without torchrun's variables, Lightning would start its own ranks.
                variables = {"TORCHELASTIC_RUN_ID": "peer-bits", "RUN_DIR": f"{folder}/run"}
                found.append(run_ranks(silent, world, trainer, init=False, env=variables)[0])
        print(
            f"{trainer.__name__:10} {len(set(found)):6}  " + "  ".join(each[:8] for each in found), flush=True
        )
    sys.exit(len(set(found)) > 1)


if __name__ == "__main__":
    main()
