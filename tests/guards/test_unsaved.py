"""State that checkpoints do not contain is reported; attributes that only look like state are not."""

import logging
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.runs import train
from trainer.guards.unsaved import UnsavedState, _is_users_package
from trainer.optim.combined import CombinedOptimizer


class Helper:
    """A plain object of a user's class."""

    def __init__(self) -> None:
        self.mean = torch.zeros(2)


class Keeper(nn.Module):
    """Six inputs, two outputs; `kept` is what a forward pass keeps for the next one."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept, self.layer = kept, nn.Linear(6, 2)
        self.register_buffer("in_buffer", torch.zeros(()))
        self.passes, self.hidden = 0, torch.zeros(2)
        self.cache: Any = None
        self.late_cache: dict[int, Tensor] = {}
        self.late_mean = 0.0
        self.generator, self.helper = torch.Generator(), Helper()
        self.hidden_modules, self.known_modules = [nn.Linear(2, 2)], [self.layer]

    def forward(self, rows: Tensor) -> Tensor:
        out = self.layer(rows)
        self.in_buffer += 1
        match self.kept:
            case "passes":
                self.passes += 1
            case "hidden":
                self.hidden = out.detach().mean(0)
            case "generator":
                torch.rand((), generator=self.generator)
            case "helper":
                self.helper.mean = out.detach().mean(0)
            case "hidden_modules":
                self.hidden_modules[0].weight.data.mul_(0.9)
            case "late_mean" if self.in_buffer > 2:
                self.late_mean = 0.5 * self.late_mean + 1
            case "cache":
                self.cache = torch.ones(3) if self.cache is None else self.cache
            case "late_cache" if self.in_buffer == 5:
                self.late_cache[3] = torch.ones(3)
            case "output":
                self.cache = out
        return out


class Extra(Keeper):
    def get_extra_state(self) -> Any:
        return self.passes

    def set_extra_state(self, state: Any) -> None:
        self.passes = state


class Counting(torch.optim.SGD):
    """Counts in attributes, of which only the first is saved."""

    num_steps = 0

    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        self.history = deque([self.num_steps])
        super().step()


class Deciding(Counting):
    """Has its own state_dict, like an optimizer that saves its count."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"num_steps": self.num_steps}


def _two(params: Any, lr: float) -> CombinedOptimizer:
    first, *rest = params
    return CombinedOptimizer([Deciding([first], lr), torch.optim.SGD(rest, lr)])


class Teaching(nn.Module):
    """A task that keeps one object from step to step."""

    def __init__(self, kept: str = "") -> None:
        super().__init__()
        self.kept, self.center, self.plain_loss = kept, torch.zeros(2), torch.zeros(())
        self.register_buffer("in_buffer", torch.zeros(2))
        self.teacher = nn.Linear(6, 2).requires_grad_(False)

    def loss(self, model: nn.Module, rows: Tensor) -> Tensor:
        out = model(rows)
        self.plain_loss = out.detach().sum()
        match self.kept:
            case "center":
                self.center = self.center + out.detach().mean(0)
            case "in_buffer":
                self.in_buffer += 1
            case "teacher":
                self.teacher.weight.mul_(0.9)
        return out.sum()


def warnings_of(
    caplog: pytest.LogCaptureFixture, model: nn.Module | None = None, task: Any = None, optimizer: Any = None
) -> list[str]:
    """Return the attributes that each warning names in six steps and two saves."""
    caplog.clear()
    caplog.set_level(logging.WARNING)
    model, task = model or Keeper(""), task or Teaching()
    made = (optimizer or torch.optim.SGD)(model.parameters(), 0.1)
    unsaved = UnsavedState(model, task, made, compares=True)
    unsaved.start({})
    for _ in range(6):
        task.loss(model, torch.randn(3, 6)).backward()
        made.step()
        unsaved.after_step()
    unsaved.compare_at_save()
    unsaved.compare_at_save()
    messages = [record.getMessage() for record in caplog.records]
    return [message.partition("contain them: ")[2].partition(". If")[0] for message in messages]


def test_attributes_that_change_in_each_step_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    plain = ("passes", "hidden", "generator", "helper", "hidden_modules")
    for kept in (*plain, "late_mean"):
        assert warnings_of(caplog, nn.Sequential(Keeper(kept))) == [f"0.{kept}"]


def test_caches_and_saved_state_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    for kept in ("", "cache", "late_cache", "output"):
        assert not warnings_of(caplog, Keeper(kept)), kept
    assert not warnings_of(caplog, Extra("passes"))


def test_attributes_of_a_task_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    for kept in ("center", "in_buffer", "teacher"):
        assert warnings_of(caplog, task=Teaching(kept)) == [f"task.{kept}"]
    assert not warnings_of(caplog, task=SimpleNamespace(loss=Teaching().loss))


def test_attributes_of_an_optimizer_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(caplog, optimizer=Counting) == ["optimizer.history"]
    assert warnings_of(caplog, optimizer=_two) == [
        "optimizer.parts.0.history"
    ]  # which does not use its state dict
    assert not warnings_of(caplog, optimizer=Deciding)


def test_differences_after_a_resume_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    model, task = Keeper("cache"), Teaching()
    task.center = task.reference = None
    unsaved = UnsavedState(model, task, torch.optim.SGD(model.parameters(), 0.1), compares=True)
    model(torch.randn(3, 6))  # as in the dry run
    unsaved.start({})
    task.center, task.reference = torch.ones(2), torch.ones(2)
    unsaved.after_step()
    saved = unsaved.compare_at_save()
    assert saved.keys() == {"cache", "task.center", "task.reference"} and not caplog.records
    task.center = None
    unsaved.start(saved)
    assert ["contain them: task.center. If" in record.getMessage() for record in caplog.records] == [True]


def test_objects_of_libraries_are_not_traversed() -> None:
    """Libraries may be installed anywhere, and their objects may be large."""
    assert _is_users_package("tests") and not any(
        map(_is_users_package, ("hydra", "torch", "trainer", "json", "yaml"))
    )


@pytest.mark.slow
def test_a_run_reports_unsaved_state(tmp_path: Path) -> None:
    train(
        "model._target_=tests.guards.test_unsaved.Keeper",
        "+model.kept=passes",
        "~model.input_shape",
        "~model.num_classes",
        "~model.hidden",
        "data.dataset._target_=tests.user_parts.Stripes",
        "train.global_batch_size=16",
        "train.max_steps=3",
        f"run_dir={tmp_path}",
    )
    assert (tmp_path / "train.log").read_text().count("checkpoints do not contain them: passes. If") == 1
