"""Ranks that use different parts of a unit get an error, since FSDP reduces its gradients as one tensor."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.failures.test_ends import refusals
from tests.ranks import run_ranks
from tests.runs import TORCH_2_14, train
from tests.strategies.test_ddp import QUICK
from trainer.tasks import Classification

PARTS = (*QUICK, "model._target_=tests.strategies.test_used.Parts", "train.max_steps=6")


class Chosen(nn.Module):
    """A unit of which a pass uses the layers that `rule` selects."""

    def __init__(self, rule: str) -> None:
        super().__init__()
        self.rule = rule
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, rows: Tensor) -> Tensor:
        rank = dist.get_rank()
        used = {"first on all": [0], "one each": [rank], "fewer": [0, 1][: 2 - rank]}.get(self.rule, [0, 1])
        for number in used:
            rows = self.layers[number](rows).tanh()
        return rows


class Parts(nn.Module):
    def __init__(self, rule: str = "") -> None:
        super().__init__()
        self.chosen, self.head, self.rule = Chosen(rule), nn.Linear(6, 2), rule
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    @property
    def fsdp_units(self) -> list[nn.Module]:
        return [] if self.rule == "an object" else [self.chosen, *self.blocks]

    def forward(self, rows: Tensor) -> Any:
        rows = self.chosen(rows)
        left_out = dist.get_rank() if self.rule == "a block each" else None
        for number, block in enumerate(self.blocks):
            if number != left_out:
                rows = block(rows).tanh()
        logits = self.head(rows)
        return SimpleNamespace(logits=logits) if self.rule == "an object" else logits


class Penalty(Classification):
    """Adds the norm of the gradient of the loss with respect to the inputs."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        rows, labels = batch
        loss = super().loss(model, (rows.requires_grad_(), labels))
        (slope,) = torch.autograd.grad(loss, rows, create_graph=True)
        return loss + slope.square().sum()


class Decay(Classification):
    """Adds the norm of the parameters outside a forward pass."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        squares = [parameter.square().sum() for parameter in model.parameters()]
        return super().loss(model, batch) + 0.01 * sum(squares)


class Slopes(Classification):
    """Adds the norm of the gradient with respect to the parameters."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + sum(slope.square().sum() for slope in slopes)


@pytest.mark.slow
def test_ranks_that_use_different_parameters_are_refused_by_name(tmp_path: Path) -> None:
    def named(name: str, more: int, rank: int = 0) -> str:
        return f"the loss uses {name} (and {more} more) on rank {rank} and not on {1 - rank}, but"

    expected = {
        "one each": named("chosen.layers.0.weight", 3),
        "fewer": named("chosen.layers.1.weight", 1),  # for which gloo would abort the process
        "a block each": named("blocks.0.weight", 3, rank=1),
        "an object": "no parameter received a gradient in the first backward pass",
        "": "accepted",
    }
    runs = [
        (*PARTS, "strategy=fsdp", f"+model.rule='{rule}'", f"run_dir={tmp_path}/{number}")
        for number, rule in enumerate(expected)
    ]
    penalty = ("data.task._target_=tests.strategies.test_used.Penalty", f"run_dir={tmp_path}/penalty")
    runs.append((*PARTS, "strategy=fsdp", *penalty))
    decay = ("data.task._target_=tests.strategies.test_used.Decay", f"run_dir={tmp_path}/decay")
    runs.append((*PARTS, "strategy=fsdp", *decay))
    slopes = ("data.task._target_=tests.strategies.test_used.Slopes", f"run_dir={tmp_path}/slopes")
    runs.append((*PARTS, "strategy=fsdp", *slopes))
    words = [*expected.values(), "a second backward pass went through a unit"]
    words.append("UserError: strategy=fsdp: the loss uses parameters outside the model's forward pass")
    words.append("differentiates with respect to tensors on which the outputs do not depend, such as")
    for messages in run_ranks(refusals, 2, *runs, init=False):
        for message, expectation in zip(messages, words, strict=True):
            assert expectation in message, message


def _both(root: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    ran = (*PARTS, "optim=adamw", "strategy.find_unused_parameters=true")
    return [
        tuple(
            train(*ran, f"+model.rule='{rule}'", f"strategy={strategy}", f"run_dir={root}/{strategy}-{rule}")
            for strategy in ("ddp", "fsdp")
        )
        for rule in ("first on all", "one each", "fewer")
    ]


@pytest.mark.slow
@pytest.mark.skipif(not TORCH_2_14, reason="needs torch 2.14")
def test_ranks_may_use_different_parameters(tmp_path: Path) -> None:
    """Parameters that no rank uses do not change, with momentum and weight decay."""
    for ddp, fsdp in run_ranks(_both, 2, str(tmp_path), init=False)[0]:
        assert fsdp["train/loss"] == pytest.approx(ddp["train/loss"], rel=1e-6)


def train_alone(run_dir: Path) -> Any:
    return train(*PARTS, "strategy=ddp", "+model.rule=first on all", f"run_dir={run_dir}")["steps"]


@pytest.mark.slow
def test_ddp_on_one_rank_waits_for_no_gradient(tmp_path: Path) -> None:
    assert run_ranks(train_alone, 1, tmp_path, init=False) == [6]
