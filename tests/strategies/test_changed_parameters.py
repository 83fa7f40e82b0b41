"""Under every strategy, changes of parameters by a pass or a loss are either kept or an error."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.failures.test_ends import refusals
from tests.ranks import run_ranks
from tests.runs import whole_and_resumed
from tests.strategies.test_ddp import QUICK
from trainer.tasks import Classification

OWN = (
    *QUICK,
    "model._target_=tests.strategies.test_changed_parameters.Changing",
    "data.task._target_=tests.strategies.test_changed_parameters.AfterThePass",
    "train.max_steps=3",
)

UNUSED = "strategy.find_unused_parameters=true"


class Block(nn.Module):
    """Changes its own weight in training, by the method `how`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(6, 6)
        self.start = nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.change(rows)
        return self.layer(rows + self.start).tanh()

    def change(self, rows: Tensor) -> None:
        if self.how == "clips":
            self.layer.weight.data.clamp_(-0.1, 0.1)
        elif self.how == "follows":  # like a teacher that still equals its student
            with torch.no_grad():
                self.start.lerp_(self.start.clone(), 0.1)
        elif self.how == "teaches":
            with torch.no_grad():
                self.start.lerp_(self.layer.bias, 0.1)
        elif self.how == "replaces":
            self.layer.weight = nn.Parameter(torch.eye(6))


class Changing(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how, self.block, self.head = how, Block(how), nn.Linear(6, 2)
        self.fsdp_units = [self.block]

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.block(rows))


class AfterThePass(Classification):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        inner: Any = getattr(model, "module", model)
        if inner.how == "in the loss":
            inner.head.weight.data.clamp_(-0.1, 0.1)
        return loss


CASES = {
    "clips": "block.layer.weight",
    "follows": "block.start",
    "replaces": "block.layer.weight",
    "in the loss": "head.weight",
    "": None,
}


@pytest.mark.slow
def test_an_optimizer_that_updates_an_old_object_is_refused(tmp_path: Path) -> None:
    for world_size, *strategy in ((2, "strategy=ddp", UNUSED), (1, "strategy=single")):
        words = (*OWN, *strategy, "+model.how=replaces", f"run_dir={tmp_path}/{world_size}")
        for (message,) in run_ranks(refusals, world_size, words, init=False):
            assert "were replaced after the model was built: block.layer.weight" in message


@pytest.mark.slow
@pytest.mark.parametrize("words", [("strategy=single",), ("strategy=ddp", UNUSED)])
def test_the_dry_run_after_a_resume_changes_no_weight(words: tuple[str, ...], tmp_path: Path) -> None:
    own = (*OWN, *words, "+model.how=teaches", "train.max_steps=6", "checkpoint.every_steps=3")
    world_size = 2 if UNUSED in words else 1
    for whole, resumed in run_ranks(whole_and_resumed, world_size, tmp_path, 3, *own, init=False):
        assert whole == resumed


def error_messages(root: Path) -> list[str]:
    words = (*OWN, "strategy=fsdp")
    runs = enumerate(CASES)
    return refusals(*((*words, f"+model.how='{how}'", f"run_dir={root}/{number}") for number, how in runs))


@pytest.mark.slow
def test_changes_that_would_be_lost_are_refused(tmp_path: Path) -> None:
    for rank, messages in enumerate(run_ranks(error_messages, 2, tmp_path, init=False)):
        for (how, name), message in zip(CASES.items(), messages, strict=True):
            expected = (
                "accepted" if name is None else f"changes {name} (values or requires_grad) in a gathered copy"
            )
            assert expected in message, f"{how} on rank {rank}: {message}"
