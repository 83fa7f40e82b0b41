"""Parts of a loss are logged as means over ranks, micro-batches and steps, weighted as the loss is."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.ranks import run_ranks
from tests.runs import train
from trainer.errors import UserError
from trainer.exact.sum_order import SumOrder
from trainer.report.loss_parts import LossParts
from trainer.tasks import Classification


class Alone(SumOrder):
    """The sum order of a single process without a process group."""

    def over_ranks(self, sums: Tensor) -> Tensor:
        return sums


def parts_of_one() -> LossParts:
    return LossParts(SimpleNamespace(world_size=1, device=torch.device("cpu")), Alone())  # type: ignore[arg-type]


class Two(Classification):
    """A loss with two parts over the samples with a label, and a third part in some steps only."""

    step = 0

    def begin_step(self, step: int, last_step: int) -> None:
        self.step = step

    def loss(self, model: nn.Module, batch: Any) -> Any:
        logits, labels = model(batch[0]), batch[1]
        entropy = F.cross_entropy(logits, labels)
        size = logits[labels != -100].square().sum() / (labels != -100).sum()
        odd = {"step": self.step} if self.step % 2 else {}
        return entropy + 0.5 * size, {"entropy": entropy, "size": size, **odd}


class Replayed(Two):
    """Reuse one tensor for each loss, as a CUDA graph does."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss, parts = super().loss(model, batch)
        loss.data = _PLACE.copy_(loss.detach())
        return loss, parts


_PLACE = torch.zeros(())
RUN = (
    *("logger=jsonl", "train.max_steps=12", "train.log_every_steps=6", "schedule=constant"),
    "optim.momentum=0",
    *("data.dataset._target_=tests.tasks.test_label_counts.Blanked", "train.eval_every_epochs=0"),
    *("data.task._target_=tests.report.test_loss_parts.Two", "model.hidden=[8]"),
    "checkpoint.every_epochs=null",
)
WAYS = {
    "single": (1, "strategy=single", "train.global_batch_size=16"),
    "ddp": (2, "strategy=ddp", "train.micro_batch_size=2", "train.global_batch_size=16"),
    "fsdp": (2, "strategy=fsdp", "train.micro_batch_size=4", "train.global_batch_size=16"),
    "exact": (2, "strategy=ddp", "train.exact=4", "train.global_batch_size=16"),
}


def logged(run_dir: Path, *overrides: str) -> list[dict[str, float]]:
    train(*RUN, *overrides, f"run_dir={run_dir}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    names = ("train/loss", "train/entropy", "train/size", "train/step")
    return [{name: line[name] for name in names} for line in lines if "train/loss" in line]


@pytest.mark.slow
def test_the_parts_add_up_to_the_loss_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Label one sample in ten, so that micro-batches and ranks have different weights in a step."""
    found = {}
    for way, (world, *overrides) in WAYS.items():
        found[way] = run_ranks(logged, world, tmp_path / way, *overrides, init=False)[0]
        for line in found[way]:
            assert line["train/entropy"] + 0.5 * line["train/size"] == pytest.approx(line["train/loss"], 1e-6)
        assert found[way][1]["train/step"] == pytest.approx(9)  # in steps 7, 9 and 11, which all have labels
        for one, other in zip(found["single"], found[way], strict=True):
            assert other == pytest.approx(one, 1e-5)
    said = (tmp_path / "ddp" / "train.log").read_text()
    assert f"(entropy {found['ddp'][0]['train/entropy']:.4f}, size" in said


def test_a_skipped_step_is_excluded_from_the_mean() -> None:
    parts = parts_of_one()
    for value, made in (1.0, True), (torch.nan, False), (2.0, True):
        parts.add({"a": torch.tensor(value)}, 4, 1)
        parts.add({"a": torch.tensor(5.0, requires_grad=True)}, 4, 3)
        parts.end_step(made)
    assert parts.means() == {"a": pytest.approx((1.5 + 3 * 5) / 4)}
    parts.begin_window()
    assert parts.means() == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lr/head": 1.0}, "train/lr/head is another metric"),
        ({"a": torch.ones(2)}, "the part a of the loss returned a tensor of shape (2,)"),
    ],
)
def test_invalid_loss_parts_are_named(given: dict[str, Tensor], words: str) -> None:
    parts = parts_of_one()
    parts.add({"loss/box": 1.0}, 1, 1)
    with pytest.raises(UserError) as error:
        parts.add(given, 1, 1)
    assert words in str(error.value)


@pytest.mark.slow
def test_losses_of_replayed_graphs_are_kept_until_summed(tmp_path: Path) -> None:
    """A micro-batch that has all labels of its step is not divided."""
    common = ("strategy=single", "train.global_batch_size=16", "train.micro_batch_size=8")
    replays = (
        "data.task._target_=tests.report.test_loss_parts.Replayed",
        "train.compile_mode=reduce-overhead",
    )
    plain = run_ranks(logged, 1, tmp_path / "plain", *common, init=False)
    assert run_ranks(logged, 1, tmp_path / "replayed", *common, *replays, init=False) == plain
