"""model.adapters: adapters of peft in models of transformers, and the errors if they cannot be added."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.ranks import run_ranks
from tests.runs import train
from trainer import api
from trainer.checkpoint.__main__ import main
from trainer.errors import UserError
from trainer.model.adapters import add_adapters

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 16}
KINDS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 2}),
    "bert": ("BertForSequenceClassification", "BertConfig", {"num_labels": 3}),
}
ADAPTERS = {
    "llama": "r:4,target_modules:[q_proj,v_proj,down_proj],use_dora:true,task_type:CAUSAL_LM",
    "bert": "r:4,target_modules:[query,value],lora_dropout:0.1,modules_to_save:[classifier]",
}
TOKENS = torch.arange(24).reshape(4, 6) % 64


class Rows(Dataset[dict[str, Tensor]]):
    """Sequences, whose labels are themselves or, with `classes`, a class."""

    def __init__(self, split: str, classes: bool) -> None:
        rows = torch.arange(16)[:, None] * 3 + torch.arange(6)
        self.rows, self.labels = rows % 64, torch.arange(16) % 3 if classes else rows % 64

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.labels[index]}


def short_llama(config: Any) -> Any:
    """A model in bf16, whose adapters are fp32."""
    return pytest.importorskip("transformers").LlamaForCausalLM(config).bfloat16()


def words(root: Path, kind: str, *more: str) -> tuple[str, ...]:
    name, config, sizes = KINDS[kind]
    settings = ",".join(f"{key}:{value}" for key, value in (SIZES | sizes).items())
    return (
        *("model=own", "data=own", "optim=adamw", "schedule=constant", "optim.lr=0.01", "logger=jsonl"),
        f"model._target_=transformers.{name}",
        f"+model.config={{_target_:transformers.{config},{settings}}}",
        *("data.dataset._target_=tests.models.test_adapters.Rows", f"+data.dataset.classes={kind == 'bert'}"),
        *("data.task._target_=trainer.tasks.OwnLoss", f"+data.task.shifted={kind == 'llama'}"),
        *("train.global_batch_size=4", "train.eval_every_epochs=0", "train.max_steps=4"),
        *("checkpoint.every_steps=2", "checkpoint.frozen=false", f"model.init_from={root / 'base'}"),
        f"model.adapters={{_target_:peft.LoraConfig,{ADAPTERS[kind]}}}",
        *more,
    )


def base(root: Path, kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    name, config, sizes = KINDS[kind]
    torch.manual_seed(5)
    model = getattr(transformers, name)(getattr(transformers, config)(**SIZES, **sizes))
    model.save_pretrained(root / "base")
    return model


def size_of(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.glob("model-*"))


def runs(root: Path, kind: str, strategy: tuple[str, ...]) -> list[str]:
    """Return the hashes of an uninterrupted run, and of a resumed run."""
    given = (*words(root, kind), *strategy)
    hashes = [str(train(*given, f"run_dir={root / 'whole'}")["param_sha256"])]
    train(*given, f"run_dir={root / 'halves'}", "train.max_steps=2")
    hashes.append(str(train(*given, f"run_dir={root / 'halves'}", "resume=auto")["param_sha256"]))
    train(*given, f"run_dir={root / 'all'}", "train.max_steps=2", "checkpoint.frozen=true")
    return hashes


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model.eval()(TOKENS).logits


STRATEGIES = {
    "single": (1, ("strategy=single",)),
    "ddp": (2, ("strategy=ddp",)),
    "fsdp": (2, ("strategy=fsdp", "strategy.unit_min_params=2000")),
    "short": (2, ("strategy=fsdp", "model._target_=tests.models.test_adapters.short_llama")),
}


CASES = [
    (kind, strategy) for kind in KINDS for strategy in STRATEGIES if (kind, strategy) != ("bert", "short")
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "strategy"), CASES)
def test_adapters_are_trained_saved_alone_and_opened_by_peft(
    tmp_path: Path, kind: str, strategy: str
) -> None:
    peft = pytest.importorskip("peft", reason="pip install 'ringmaster-trainer[peft]'")
    begun = base(tmp_path, kind)
    begun = begun.bfloat16() if strategy == "short" else begun
    world_size, options = STRATEGIES[strategy]
    hashes = run_ranks(runs, world_size, tmp_path, kind, options, init=False)[0]
    assert len(set(hashes)) == 1, hashes
    newest = tmp_path / "halves" / "checkpoints" / "step_00000004"
    assert size_of(newest) < 0.5 * size_of(tmp_path / "all" / "checkpoints" / "step_00000002")
    trained = api.load_model(tmp_path / "halves", "newest")
    assert (logits(trained) - logits(begun)).abs().max() > 1e-3
    assert main(["convert", str(newest), str(tmp_path / "out"), "--to", "peft"]) == 0
    opened = peft.PeftModel.from_pretrained(begun, tmp_path / "out")
    torch.testing.assert_close(logits(opened), logits(trained), rtol=0, atol=1e-6)


WRONG = {
    "freeze classifier.weight, classifier.bias at random values": ("model.adapters.modules_to_save=null",),
    "model.adapters: No modules were targeted for adaptation": ("model.adapters.target_modules=[qkv]",),
    "expected a configuration of peft, such as peft.LoraConfig, but torch.nn.Linear returned a Linear": (
        *("model.adapters=null", "model.adapters={_target_:torch.nn.Linear,in_features:2,out_features:2}"),
    ),
    "model.adapters has no _target_": ("model.adapters=null", "model.adapters={r:4}"),
}


def said(root: Path, calls: list[tuple[str, ...]]) -> list[str]:
    """Return the errors of the runs; empty for runs that trained."""
    found = []
    for number, call in enumerate(calls):
        try:
            train(*call, "train.max_steps=1", "checkpoint.frozen=true", f"run_dir={root / str(number)}")
            found.append("")
        except UserError as error:
            found.append(str(error))
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    return found


@pytest.mark.slow
def test_unsuitable_adapters_are_a_one_line_error(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    base(tmp_path, "bert").base_model.save_pretrained(tmp_path / "base")  # without the head
    calls = [(*words(tmp_path, "bert"), *more) for more in ((), ("model.init_from=null",), *WRONG.values())]
    trained, random, *found = run_ranks(said, 1, tmp_path, calls, init=False)[0]
    assert not trained, "modules_to_save trains the head"
    assert not random
    assert "with values from the constructor" in (tmp_path / "1/train.log").read_text()
    for text, expected in zip(found, WRONG, strict=True):
        assert expected in text


def test_without_peft_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    needs = r"model.adapters requires the package peft \(.*\): pip install 'ringmaster-trainer\[peft\]'"
    with pytest.raises(UserError, match=needs):
        add_adapters(torch.nn.Linear(2, 2), {"_target_": "peft.LoraConfig"})
