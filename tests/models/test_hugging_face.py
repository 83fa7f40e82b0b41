"""Models with Hugging Face's interface, built from YAML, with each strategy: a stand-in and a real model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from tests.ranks import run_ranks
from tests.runs import settings, train

STRATEGIES = {"single": 1, "fsdp": 2}


@dataclass
class Output:
    """The output of a model of Hugging Face: an object, not a tensor."""

    logits: Tensor
    loss: Tensor | None = None


class Played(nn.Module):
    """A stand-in: input_ids (B, T) and labels (B, T) or None; shifts labels and ties its head."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.head(self.embedding(input_ids).cumsum(dim=1).tanh())
        if labels is None:
            return Output(logits)
        return Output(logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of tokens as dicts, as in Hugging Face's datasets."""

    vocab_size = 16

    def __init__(self, split: str) -> None:
        generator = torch.Generator().manual_seed(len(split))
        self.rows = torch.randint(16, (22, 1), generator=generator) + torch.arange(6)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index] % 16, "labels": self.rows[index] % 16}


COMMON = (
    "logger=jsonl",
    "train.max_steps=6",
    "train.epochs=9",
    "train.global_batch_size=8",
    "schedule=constant",
    "optim.lr=0.01",
)
PLAYED = (
    *COMMON,
    "optim=adamw",
    "model._target_=tests.models.test_hugging_face.Played",
    "+model.vocab_size=auto",
    "~model.input_shape",
    "~model.num_classes",
    "~model.hidden",
)
TASKS = {
    "logits": ("data=text", "data.dataset.block_size=8", "train.eval_every_epochs=1"),
    "loss": (
        "data.dataset={_target_:tests.models.test_hugging_face.Rows}",
        "data.task={_target_:trainer.tasks.OwnLoss}",
        "+data.task.shifted=true",
        "~data.task.label_smoothing",
    ),
}


def _each(root: Path, strategy: str, *runs: tuple[str, ...]) -> list[dict[str, Any]]:
    results = []
    for number, options in enumerate(runs):
        results.append(train(*options, f"strategy={strategy}", f"run_dir={root / str(number)}"))
    return results


def _under_each(root: Path, *runs: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    return {
        strategy: run_ranks(_each, world, root / strategy, strategy, *runs, init=False)[0]
        for strategy, world in STRATEGIES.items()
    }


@pytest.mark.slow
def test_a_model_with_transformers_signature(tmp_path: Path) -> None:
    results = _under_each(tmp_path, *((*PLAYED, *task) for task in TASKS.values()))
    for by_logits, by_loss in results.values():
        assert by_logits["eval/perplexity"] < 2000 and 0 < by_loss["eval/loss"] < 16
    for sharded, single in zip(results["fsdp"], results["single"], strict=True):
        assert sharded["eval/loss"] == pytest.approx(single["eval/loss"], rel=1e-4)


@pytest.mark.slow
def test_a_transformers_model_from_yaml_only(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    options = ("experiment=hf_gpt2_tiny", *COMMON, "schedule.warmup_steps=0")
    options += ("data.dataset.block_size=16", "model.config.n_embd=16")
    options += tuple(f"+model.config.{part}_pdrop=0" for part in ("embd", "resid", "attn"))
    assert settings(*options).model["config"]["n_positions"] == 16
    results = _under_each(tmp_path, options)
    for strategy, (result,) in results.items():
        assert result["eval/perplexity"] < 260, strategy
        assert result["eval/loss"] == pytest.approx(results["single"][0]["eval/loss"], rel=1e-4)
