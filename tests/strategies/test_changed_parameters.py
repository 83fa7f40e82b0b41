"""What a pass or a loss changes in a parameter counts, or is refused by name, under every strategy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.faults.test_ends import refusals
from tests.ranks import run_ranks
from tests.strategies.test_ddp import QUICK
from trainer.tasks import Classification

OWN = (
    *QUICK,
    "model._target_=tests.strategies.test_changed_parameters.Changing",
    "data.task._target_=tests.strategies.test_changed_parameters.AfterThePass",
    "train.max_steps=13",
    "train.epochs=3",
)

UNUSED = "strategy.find_unused_parameters=true"


class Block(nn.Module):
    """Changes its own weight in training from its pass `since` on, as `how` says."""

    def __init__(self, how: str, since: int) -> None:
        super().__init__()
        self.how, self.since, self.passes = how, since, 0
        self.layer = nn.Linear(6, 6)
        self.start = nn.Parameter(torch.zeros(6), requires_grad=False)
        if how.startswith("backward"):
            (self.layer if "layer" in how else self).register_full_backward_hook(self.clip)

    def forward(self, rows: Tensor) -> Tensor:
        self.passes += self.training
        if self.training and self.passes >= self.since:
            self.change(rows)
        if not self.training and self.how == "in evaluation":
            self.layer.weight.data.clamp_(-0.1, 0.1)
        return self.layer(rows + self.start).tanh()

    def clip(self, *_: Any) -> None:
        if self.passes >= self.since:
            self.layer.weight.data.clamp_(-0.1, 0.1)

    def change(self, rows: Tensor) -> None:
        at_times = self.how == "clips at times" and self.passes % 4 == self.since % 4
        if self.how == "clips" or at_times:
            self.layer.weight.data.clamp_(-0.1, 0.1)
        elif self.how == "moves":
            self.start.data = self.start.data * 0.9 + rows.mean(dim=0)
        elif self.how == "starts" and self.passes == self.since:
            with torch.no_grad():
                self.start.add_(rows.mean(dim=0))
        elif self.how == "scales":
            with torch.no_grad():
                self.layer.weight.div_(self.layer.weight.norm())
        elif self.how == "replaces" and self.passes == self.since:
            self.layer.weight = nn.Parameter(torch.eye(6))


class Changing(nn.Module):
    def __init__(self, how: str = "", since: int = 1) -> None:
        super().__init__()
        self.how, self.since, self.block, self.head = how, since, Block(how, since), nn.Linear(6, 2)
        self.stem = nn.Linear(6, 6) if "inner" in how else nn.Identity()
        self.fsdp_units = [self.block]

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.block(self.stem(rows)))


class AfterThePass(Classification):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        inner: Any = getattr(model, "module", model)
        if inner.how == "in the loss":
            inner.head.weight.data.clamp_(-0.1, 0.1)
        return loss


CASES = {
    ("clips", 1): "block.layer.weight",
    ("clips", 6): "block.layer.weight",
    ("clips at times", 6): "block.layer.weight",
    ("in evaluation", 1): "block.layer.weight",  # the last, after which no step follows
    ("moves", 6): "block.start",
    ("scales", 5): "block.layer.weight",
    ("starts", 1): "block.start",
    ("replaces", 1): "block.layer.weight",
    ("in the loss", 1): "head.weight",
    ("backward of the first layer", 6): "block.layer.weight",
    ("backward of an inner unit", 6): "block.layer.weight",
    ("backward of an inner layer", 1): "block.layer.weight",
    ("", 1): None,
}
# For what differs in nothing but its ranks or its collectives: each kind of change, and none.
KINDS = [("clips", 6), ("moves", 6), ("replaces", 1), ("backward of an inner unit", 6), ("", 1)]


@pytest.mark.slow
def test_an_optimizer_that_updates_an_old_object_is_refused(tmp_path: Path) -> None:
    for world_size, *strategy in ((2, "strategy=ddp", UNUSED), (1, "strategy=single")):
        words = (*OWN, *strategy, "+model.how=replaces", f"run_dir={tmp_path}/{world_size}")
        for (message,) in run_ranks(refusals, world_size, words, init=False):
            assert "block.layer.weight of the model is another object than before the first" in message


def told(strategy: tuple[str, ...], cases: list[tuple[str, int]], root: Path) -> list[str]:
    runs = [
        (
            *(*OWN, *strategy, f"+model.how='{how}'", f"+model.since={since}", f"run_dir={root}/{number}"),
            *(("train.eval_every_epochs=3",) if how == "in evaluation" else ()),
        )
        for number, (how, since) in enumerate(cases)
    ]
    return refusals(*runs)


@pytest.mark.parametrize(
    ("strategy", "world_size", "cases", "words"),
    [
        pytest.param(
            ("strategy=fsdp",), 2, KINDS, "changes {} in a gathered copy", id="fsdp", marks=pytest.mark.slow
        ),
        pytest.param(("strategy=fsdp",), 1, list(CASES), "changes {} in a gathered copy", id="one rank"),
    ],
)
def test_what_would_be_lost_is_refused(
    strategy: tuple[str, ...], world_size: int, cases: list[tuple[str, int]], words: str, tmp_path: Path
) -> None:
    for rank, messages in enumerate(run_ranks(told, world_size, strategy, cases, tmp_path, init=False)):
        for case, message in zip(cases, messages, strict=True):
            expected = "accepted" if (name := CASES[case]) is None else words.format(name)
            assert expected in message, f"{case} on rank {rank}: {message}"
