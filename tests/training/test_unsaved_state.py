"""State that no checkpoint holds is named; attributes that only look like state are not."""

import itertools
import logging
import multiprocessing
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils import weight_norm
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

from tests.runs import train
from trainer.optim.combined import CombinedOptimizer
from trainer.tasks import Classification
from trainer.training.unsaved_state import UnsavedState


class Keeper(nn.Module):
    """Six inputs, two outputs; `kept` is what a forward pass keeps for the next."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept, self.layer = kept, nn.Linear(6, 2)
        if kept == "weight norm":
            self.layer = weight_norm(self.layer)
        self.register_buffer("in_buffer", torch.zeros(()))
        self.rnn, self.passes, self.history, self.hidden = nn.LSTM(2, 2), 0, [0], torch.zeros(2)
        self.cache: Tensor | None = None
        self.generator, self.namespace = torch.Generator(), SimpleNamespace(passes=0)
        self.hidden_modules, self.known_modules = [nn.Linear(2, 2)], [self.layer]

    def forward(self, rows: Tensor) -> Tensor:
        out = self.layer(rows)
        self.rnn(out)
        match self.kept:
            case "number":
                self.passes += 1
            case "list":
                self.history.append(1)
            case "generator":
                torch.rand((), generator=self.generator)
            case "hidden module":
                self.hidden_modules[0].weight.data.mul_(0.9)
            case "namespace":
                self.namespace.passes += 1
            case "tensor":
                self.hidden = out.detach().mean(0)
            case "cache":
                self.cache = torch.ones(3) if self.cache is None else self.cache
            case "buffer":
                self.in_buffer += 1
            case "output":
                self.cache = out
        return out


class Helper:
    """A plain object with a slot and a class attribute."""

    __slots__ = ("mean",)
    rate = 0.9


class Hoarder(nn.Module):
    """Keeps one thing, in something other than a list, dict or tensor."""

    passes_of_all, scale = 0, 1.0

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept, self.layer, self.calls = kept, nn.Linear(6, 2), itertools.count()
        self.seen: set[int] = set()
        self.counter: Counter[str] = Counter()
        self.helper, self.state, self.steps = Helper(), np.random.RandomState(0), iter(range(8))
        self.helper.mean = torch.zeros(2)
        self.numbers = (number for number in range(8))
        self.late_cache: dict[int, Tensor] = {}
        self.late_mean: float | None = None
        self.late_history: list[float] = []
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        out = self.layer(rows)
        self.passes += 1
        match self.kept:
            case "seen":
                self.seen.add(len(self.seen))
            case "counter":
                self.counter["passes"] += 1
            case "helper":
                self.helper.mean = out.detach().mean(0)
            case "state":
                self.state.rand()
            case "calls":
                next(self.calls)
            case "steps":
                next(self.steps)
            case "numbers":
                next(self.numbers)
            case "passes_of_all":
                type(self).passes_of_all += 1
            case "scale" if self.passes == 5:
                self.scale = 0.5
            case "late_cache" if self.passes == 5:
                self.late_cache[3] = torch.ones(3)
            case "late_mean" if self.passes > 2:
                self.late_mean = 0.5 * (self.late_mean or 0) + 1
            case "late_history" if self.passes > 2:
                self.late_history.append(1)
            case "norm.training" if self.passes == 5:
                self.norm.eval()
        return out


PASSES, HISTORY = 0, [0]


def annealed() -> int:
    annealed.passes += 1  # type: ignore[attr-defined]
    return annealed.passes  # type: ignore[attr-defined,no-any-return]


annealed.passes = 0  # type: ignore[attr-defined]


class Outside(nn.Module):
    """Keeps one thing where no attribute of a module shows it, or in an object of torch or Python."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept, self.layer, self.call, passes = kept, nn.Linear(6, 2), Extra("").count, 0

        def count() -> None:
            nonlocal passes
            passes += 1

        self.count, self.partial = count, partial(HISTORY.append, 1)
        self.delta, self.array = torch.zeros(2, requires_grad=True), bytearray(2)
        self.value = multiprocessing.Value("i", 0)
        self.clock = ExponentialLR(torch.optim.SGD([torch.zeros(1)], 1.0), 0.9)
        self.inner = torch.optim.SGD([torch.zeros(1)], 1.0, momentum=0.9)
        self.inner.param_groups[0]["params"][0].grad = torch.ones(1)

    def forward(self, rows: Tensor) -> Tensor:
        global PASSES
        match self.kept:
            case "PASSES":
                PASSES += 1
            case "HISTORY":
                HISTORY[0] += 1
            case "annealed":
                annealed()
            case "count":
                self.count()
            case "call":
                self.call()
            case "delta":
                self.delta = (self.delta + 1).detach().requires_grad_()
            case "array":
                self.array[0] += 1
            case "value":
                self.value.value += 1
            case "clock":
                self.clock.optimizer.step()
                self.clock.step()
            case "inner":
                self.inner.step()
        return self.layer(rows)


class LongerSteps(torch.optim.SGD):
    """Counts in a plain attribute."""

    num_steps = 0

    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        super().step()


class Deciding(LongerSteps):
    """Has a state dict of its own, as one that saves its count."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"num_steps": self.num_steps}


def _two(params: Any, lr: float) -> CombinedOptimizer:
    weight, bias = params
    return CombinedOptimizer([Deciding([weight], lr), torch.optim.SGD([bias], lr)])


class Sharing(torch.optim.SGD):
    """Steps by another optimizer, which has its state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.inner = torch.optim.AdamW(self.param_groups, lr)
        self.state = self.inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Extra(Keeper):
    def count(self) -> None:
        self.passes += 1

    def get_extra_state(self) -> Any:
        return self.passes

    def set_extra_state(self, state: Any) -> None:
        self.passes = state


NAMED = {
    "number": "passes",
    "list": "history",
    "tensor": "hidden",
    "generator": "generator",
    "namespace": "namespace",
    "hidden module": "hidden_modules",
}


class Teaching(nn.Module):
    """A task that keeps a tensor, and what it is told to keep, from step to step."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept, self.center, self.plain_loss = kept, torch.zeros(2), torch.zeros(())
        self.register_buffer("in_buffer", torch.zeros(2))
        self.teacher = nn.Linear(6, 2).requires_grad_(False)

    def loss(self, model: nn.Module, rows: Tensor) -> Tensor:
        out = model(rows)
        self.plain_loss = out.detach().sum()
        if self.kept == "center":
            self.center = self.center + out.detach().mean(0)
        elif self.kept == "in_buffer":
            self.in_buffer += 1
        elif self.kept == "teacher":
            self.teacher.weight.mul_(0.9)
        return out.sum()


def warnings_of(model: nn.Module, caplog: pytest.LogCaptureFixture, kept: str = "") -> list[str]:
    task = Teaching(kept)
    caplog.clear()
    kinds = {"optimizer": LongerSteps, "sharing": Sharing, "deciding": Deciding, "two": _two}
    optimizer: Any = kinds.get(kept, torch.optim.SGD)(model.parameters(), 0.1)
    unsaved = UnsavedState(model, task, optimizer, True)
    for _ in range(6):
        model.train()  # as after an evaluation
        task.loss(model, torch.randn(3, 6)).backward()
        optimizer.step()
        unsaved.look()
    unsaved.look_at_save()
    unsaved.look_at_save()
    return [record.getMessage() for record in caplog.records]


@pytest.mark.slow
def test_so_is_a_sharded_tensor_that_a_task_keeps(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(6, 2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        teacher = distribute_tensor(torch.ones(2, 6), init_device_mesh("cpu", (1,)), [Shard(0)])
        unsaved = UnsavedState(
            model, SimpleNamespace(teacher=[teacher]), torch.optim.SGD(model.parameters()), True
        )
        for _ in range(2):
            teacher.mul_(0.9)
            unsaved.look()
    finally:
        dist.destroy_process_group()
    assert caplog.records[0].getMessage().startswith("task.teacher changes from step to step")


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_what_changes_with_each_step_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for kept, name in NAMED.items():
        (message,) = warnings_of(nn.Sequential(Keeper(kept)), caplog)
        assert message.startswith(f"0.{name} changes from step to step"), message
    for kept in ("", "cache", "buffer", "output", "weight norm"):
        assert not warnings_of(Keeper(kept), caplog), kept
    assert not warnings_of(Extra("number"), caplog)


def test_so_is_what_objects_and_classes_keep(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    in_objects = ("seen", "counter", "helper", "state", "calls", "steps", "numbers", "passes_of_all")
    for kept in (*in_objects, "scale", "late_mean", "late_history", "norm.training"):
        (message,) = warnings_of(Hoarder(kept), caplog)
        assert message.startswith(f"{kept} changes from step to step"), message
    for kept in ("", "late_cache"):
        assert not warnings_of(Hoarder(kept), caplog), kept


def test_so_is_what_functions_and_globals_keep(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    here = dict.fromkeys(("PASSES", "HISTORY", "annealed"), f"{__name__}.")
    for kept in (
        "PASSES",
        "HISTORY",
        "annealed",
        "count",
        "call",
        "delta",
        "array",
        "value",
        "clock",
        "inner",
    ):
        (message,) = warnings_of(Outside(kept), caplog)
        assert message.startswith(f"{here.get(kept, '')}{kept} changes from step to step"), message
    assert not warnings_of(Outside(""), caplog)


class OwnLoss(Classification):
    """Without its base's cross entropy, which an evaluation then calls for the first time."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).sum()


def test_so_are_multipliers_of_a_schedule_and_no_parts_of_this_project(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    model, calls, task = nn.Linear(6, 2), [0], OwnLoss()

    def falling(step: int) -> float:
        calls[0] += 1
        return 1 / calls[0]

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = LambdaLR(optimizer, falling)
    unsaved = UnsavedState(model, task, optimizer, True, schedule)
    batch = torch.randn(3, 6), torch.zeros(3, dtype=torch.int64)
    for _ in range(4):
        task.loss(model, batch)
        optimizer.step()
        schedule.step()
        unsaved.look()
        task.eval_sums(model, batch)
    (record,) = caplog.records
    assert record.getMessage().startswith("schedule.lr_lambdas changes from step to step")


def test_so_is_what_an_optimizer_keeps_outside_its_state(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    (message,) = warnings_of(nn.Linear(6, 2), caplog, "optimizer")
    assert message.startswith("optimizer.num_steps changes from step to step"), message
    assert not warnings_of(nn.Linear(6, 2), caplog, "sharing")
    assert not warnings_of(nn.Linear(6, 2), caplog, "deciding")
    (message,) = warnings_of(nn.Linear(6, 2), caplog, "two")  # their combination does not use its state dict
    assert message.startswith("optimizer.num_steps changes from step to step"), message


def test_so_is_what_a_task_keeps(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for kept in ("center", "in_buffer", "teacher"):
        (message,) = warnings_of(nn.Linear(6, 2), caplog, kept)
        assert message.startswith(f"task.{kept} changes from step to step"), message
    assert not warnings_of(nn.Linear(6, 2), caplog)


@pytest.mark.slow
def test_a_run_says_so(tmp_path: Path) -> None:
    train(
        "model._target_=tests.training.test_unsaved_state.Keeper",
        "+model.kept=number",
        "~model.input_shape",
        "~model.num_classes",
        "~model.hidden",
        "data.dataset._target_=tests.user_parts.Stripes",
        "train.global_batch_size=16",
        "train.max_steps=3",
        f"run_dir={tmp_path}",
    )
    assert (tmp_path / "train.log").read_text().count("passes changes from step to step") == 1
