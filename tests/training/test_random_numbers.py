"""Random numbers depend on seed, step and micro-batch, but not on ranks, resumes or evaluations."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import runs
from tests.ranks import run_ranks
from trainer.loop import fit

Draws = tuple[float, ...]
SETTINGS = (
    "logger=jsonl",
    *("train.global_batch_size=64", "train.micro_batch_size=16", "train.max_steps=4", "model.hidden=[8]"),
    *("train.eval_every_epochs=0", "distributed.timeout_s=60"),
)


def _draw() -> Draws:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


class _Drawing:
    """A task whose loss and evaluation use each generator."""

    def __init__(self, task: Any) -> None:
        self._task, self.trained, self.evaluated = task, list[Draws](), list[Draws]()

    def loss(self, model: Any, batch: Any) -> Any:
        self.trained.append(_draw())
        return self._task.loss(model, batch)

    def eval_sums(self, model: Any, batch: Any) -> Any:
        self.evaluated.append(_draw())
        return self._task.eval_sums(model, batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


def _drawn(run_dir: Path, *overrides: str) -> tuple[list[Draws], list[Draws]]:
    """Return the random numbers of this rank's micro-batches and evaluations."""
    with runs.context_of(*SETTINGS, f"run_dir={run_dir}", *overrides) as context:
        task = _Drawing(context.task)
        fit(dataclasses.replace(context, task=task))
        return task.trained[1:], task.evaluated  # the first call is the dry run's


def test_random_numbers_do_not_depend_on_world_size_or_resumes(tmp_path: Path) -> None:
    ((alone, _),) = run_ranks(_drawn, 1, tmp_path, "strategy=ddp", "checkpoint.every_steps=2", init=False)
    assert len(set(alone)) == 16  # 4 steps of 4 micro-batches
    resume = f"resume={tmp_path / 'checkpoints/step_00000002'}"
    resumed = run_ranks(_drawn, 2, tmp_path / "resumed", "strategy=ddp", resume, init=False)
    ranks = [trained for trained, _ in resumed]
    # The micro-batches of replica 0, then those of replica 1.
    assert alone[8:] == [*ranks[0][:2], *ranks[1][:2], *ranks[0][2:], *ranks[1][2:]]


@pytest.mark.slow
def test_evaluation_repeats_its_random_numbers_and_leaves_training_alone(tmp_path: Path) -> None:
    ((alone, none),) = run_ranks(_drawn, 1, tmp_path / "alone", init=False)
    ((trained, evaluated),) = run_ranks(_drawn, 1, tmp_path, "train.eval_every_steps=2", init=False)
    assert not none
    assert trained == alone
    assert evaluated == 2 * evaluated[: len(evaluated) // 2]
    assert len(set(evaluated)) == len(evaluated) // 2 > 1
