"""Layers that `begin_step` freezes and unfreezes train as in plain torch, and resume with the same bits."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from tests.ranks import run_ranks
from tests.runs import context_of, train
from trainer.checkpoint.open_checkpoint import OpenCheckpoint
from trainer.errors import UserError
from trainer.loop import fit

STEPS = 9


class Points(Dataset):
    """16 points, which make one step."""

    num_classes, input_shape = 3, (8,)

    def __init__(self, split: str) -> None:
        self.y = torch.arange(16) % 3
        self.x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)) + self.y[:, None].float()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Layers(nn.Module):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.middle, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3, bias=False)
        self.first.requires_grad_(not frozen)
        self.middle.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.first(x).tanh()).tanh())


class Unfreezes:
    """Trains the middle layer in steps 2 to 6 and from 8 on, and the first layer from 5 on."""

    def begin_step(self, step: int, last_step: int, model: Any) -> None:
        model.first.requires_grad_(step >= 5)
        model.middle.requires_grad_(2 <= step < 7 or step >= 8)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])


class InLoss(Unfreezes):
    """Changes requires_grad in the loss."""

    def begin_step(self, step: int, last_step: int, model: Any) -> None:
        self.model, self.step = model, step

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        super().begin_step(self.step, STEPS, self.model)
        return super().loss(model, batch)


class Freezes(Unfreezes):
    """Freezes all parameters in step 3."""

    def begin_step(self, step: int, last_step: int, model: Any) -> None:
        model.requires_grad_(step != 3)


class Unlike(Unfreezes):
    """Makes a layer trainable one step later on rank 1."""

    def begin_step(self, step: int, last_step: int, model: Any) -> None:
        super().begin_step(step - torch.distributed.get_rank(), last_step, model)


SGD = ("optim._target_=torch.optim.SGD", "+optim.momentum=0.9", "+optim.weight_decay=0.1")
ADAGRAD = ("optim._target_=torch.optim.Adagrad", "+optim.weight_decay=0.1")
ADAMW = ("optim._target_=torch.optim.AdamW", "+optim.weight_decay=0.1", "optim.no_decay={below_dims:2}")
OPTIMIZERS: dict[tuple[str, ...], Any] = {
    SGD: lambda groups: torch.optim.SGD(groups, 0.05, momentum=0.9, weight_decay=0.1),
    ADAGRAD: lambda groups: torch.optim.Adagrad(groups, 0.05, weight_decay=0.1),
    ADAMW: lambda groups: torch.optim.AdamW(groups, 0.05, weight_decay=0.1),
}
CONSTRUCTOR, FREEZE, BEGIN_STEP = "+model.frozen=true", "model.freeze=[first,middle]", "+model.frozen=false"


def plain(options: tuple[str, ...]) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Return losses, final weights and their averages, with an optimizer that has all parameters from the start."""
    model, task, data = Layers(), Unfreezes(), Points("train")
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    if options == ADAMW:
        flat = [p for p in model.parameters() if p.ndim < 2]
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1]},
            {"params": flat, "weight_decay": 0},
        ]
    optimizer = OPTIMIZERS[options](groups)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    averages = {name: value.clone() for name, value in model.state_dict().items()}
    losses = []
    for step in range(1, STEPS + 1):
        task.begin_step(step, STEPS, model)
        optimizer.zero_grad()
        loss = task.loss(model, (data.x, data.y))
        loss.backward()
        optimizer.step(), schedule.step()
        losses.append(loss.item())
        for name, value in model.state_dict().items():
            averages[name].lerp_(value, 0.5)
    return losses, dict(model.state_dict()), averages


def overrides(task: str, *words: str) -> tuple[str, ...]:
    return (
        *("logger=jsonl", "data=own", "data.dataset._target_=tests.training.test_unfreezing.Points"),
        *("model=own", "model._target_=tests.training.test_unfreezing.Layers", "optim=own", "optim.lr=0.05"),
        f"data.task._target_=tests.training.test_unfreezing.{task}",
        *("schedule=own", "schedule._target_=torch.optim.lr_scheduler.ExponentialLR", "+schedule.gamma=0.9"),
        *(f"train.max_steps={STEPS}", "train.epochs=99", "train.global_batch_size=16", "ema.decay=0.5"),
        *("train.eval_every_epochs=0", "train.log_every_steps=1", "checkpoint.every_epochs=null"),
        *("checkpoint.every_steps=1", "checkpoint.keep_last=99", *words),
    )


def run_and_resume(folder: Path, at: list[int], *words: str) -> list[Any]:
    """Return the losses and the hash of a run, and the hashes of runs resumed from its checkpoints."""
    whole = train(*overrides("Unfreezes", *words, f"run_dir={folder / 'whole'}"))
    lines = map(json.loads, (folder / "whole/metrics.jsonl").read_text().splitlines())
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    hashes = [whole["param_sha256"]]
    for step in at:
        resume = f"resume={folder}/whole/checkpoints/step_{step:08d}"
        resumed = train(*overrides("Unfreezes", *words, f"run_dir={folder / f'from_{step}'}", resume))
        hashes.append(resumed["param_sha256"])
    return [losses, *hashes]


WAYS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "single": (1, ADAMW, ("strategy=single", CONSTRUCTOR)),
    "single, Adagrad": (1, ADAGRAD, ("strategy=single", FREEZE, "train.micro_batch_size=4")),
    "exact": (1, ADAMW, ("strategy=single", "train.exact=4", FREEZE)),
    "exact ddp": (2, SGD, ("strategy=ddp", "train.exact=4", CONSTRUCTOR)),
    "exact fsdp": (2, ADAMW, ("strategy=fsdp", "train.exact=4", BEGIN_STEP)),
    "ddp": (2, ADAMW, ("strategy=ddp", CONSTRUCTOR)),
    "ddp, ring": (3, SGD, ("strategy=ddp", "comm=ring", BEGIN_STEP, "train.global_batch_size=15")),
    "ddp, unused": (2, SGD, ("strategy=ddp", FREEZE, "strategy.find_unused_parameters=true")),
    "fsdp": (2, ADAMW, ("strategy=fsdp", FREEZE, "train.micro_batch_size=4")),
    "fsdp, unused": (2, SGD, ("strategy=fsdp", CONSTRUCTOR, "strategy.find_unused_parameters=true")),
    "server": (2, SGD, ("strategy=parameter_server", "strategy.servers=all", CONSTRUCTOR)),
}


@pytest.mark.parametrize(
    "way", ["single", *(pytest.param(w, marks=pytest.mark.slow) for w in WAYS if w != "single")]
)
def test_layers_are_frozen_and_unfrozen_by_step(way: str, tmp_path: Path) -> None:
    world, options, words = WAYS[way]
    (losses, *hashes), *_ = run_ranks(
        run_and_resume, world, tmp_path, [1, 3, 7], *options, *words, init=False
    )
    assert len({*hashes}) == 1
    if "train.global_batch_size=15" in words:
        return  # one sample is left out of each epoch
    wanted, weights, averages = plain(options)
    assert losses == pytest.approx(wanted, abs=1e-6)
    alone = (*options, *(word for word in words if not word.startswith("strategy")), "strategy=single")
    end = run_ranks(resumed_alone, 1, tmp_path, *alone, init=False)
    assert "train.exact=4" not in words or end == hashes[:1]
    for run, averaged, values in (
        ("whole", False, weights),
        ("whole", True, averages),
        ("alone", False, weights),
    ):
        last = OpenCheckpoint.open(tmp_path / run / f"checkpoints/step_{STEPS:08d}")
        for name, value in last.weights(averaged).items():
            torch.testing.assert_close(value, values[name], rtol=0, atol=2e-6)


def resumed_alone(folder: Path, *words: str) -> str:
    resume = f"resume={folder}/whole/checkpoints/step_00000003"
    return train(*overrides("Unfreezes", *words, f"run_dir={folder / 'alone'}", resume))["param_sha256"]


def refused(folder: Path, task: str, *words: str) -> str:
    run = overrides(task, *ADAMW, *words, f"run_dir={folder}")
    with pytest.raises(UserError) as error, context_of(*run) as context:
        fit(context)
    return f"{error.value} (after step {context.state.progress.step})"


REFUSED: dict[tuple[int, str, tuple[str, ...]], str] = {
    (2, "Unlike", ("strategy=ddp",)): r"on 1 of 2 ranks; .*after step 1\)",
    (2, "InLoss", ("strategy=ddp", CONSTRUCTOR)): r"changed requires_grad of middle.weight, .*after step 2\)",
    (1, "Freezes", ("strategy=single",)): r"froze all parameters in step 3; .*\(after step 2\)",
    (1, "Unfreezes", ("checkpoint.frozen=false", FREEZE)): r"does not save middle.bias, .*after step 1\)",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[1])
def test_unfreezing_what_cannot_be_trained_is_refused_in_that_step(case: Any, tmp_path: Path) -> None:
    world, task, words = case
    if "checkpoint.frozen=false" in words:
        torch.save(Layers().state_dict(), tmp_path / "weights.pt")
        words = (*words, f"model.init_from={tmp_path / 'weights.pt'}")
    for message in run_ranks(refused, world, tmp_path / "run", task, *words, init=False):
        assert re.search(REFUSED[case], message), message
