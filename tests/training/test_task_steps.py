"""`begin_step` and `end_step` of a task: step numbers, also after a resume, and a teacher network."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.failure_parts import inject
from tests.programs import finish
from tests.ranks import run_ranks
from tests.runs import context_of, steps_of, train, whole_and_resumed
from trainer import accelerator
from trainer.checkpoint.open_checkpoint import verified
from trainer.tensors.local_shard import to_local

GAN = (
    *("logger=jsonl", "data=own", "data.dataset._target_=trainer.data.digits.Digits", "model=own"),
    *("data.task._target_=examples.recipes.gan.Turns", "model._target_=examples.recipes.gan.Gan"),
    *("+model.latent=4", "+model.width=8", "optim=adamw", "schedule=constant", "train.max_steps=12"),
    *("train.micro_batch_size=16", "train.eval_every_epochs=0", "checkpoint.every_epochs=null"),
    "checkpoint.keep_last=9",
)
UNUSED = "strategy.find_unused_parameters=true"
WAYS = {
    "single": (1, "strategy=single"),
    "ddp": (2, "strategy=ddp", UNUSED),
    "fsdp": (2, "strategy=fsdp"),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_alternating_updates_resume_exactly(way: str, tmp_path: Path) -> None:
    world, *overrides = WAYS[way]
    words = (*GAN, *overrides, "checkpoint.every_steps=5")
    for whole, resumed in run_ranks(whole_and_resumed, world, tmp_path, 5, *words, init=False):
        assert whole == resumed
    said = (tmp_path / "whole" / "train.log").read_text()
    assert "WARNING" not in said and "checkpoints do not contain them" not in said


@pytest.mark.slow
def test_a_killed_gan_run_ends_with_the_same_hash(tmp_path: Path) -> None:
    """It is killed in the middle of a step; the next save is in a step of the critic."""
    gan = [word for word in GAN if "task._target_" not in word]
    killed = inject("kill", 0, 8, "backward", mark=tmp_path / "mark", task="examples.recipes.gan.Turns")
    hashes = []
    for name, saves in ("whole", "checkpoint.every_steps=100"), ("killed", "checkpoint.every_steps=5"):
        if name == "whole":
            (tmp_path / "mark").touch()
        else:
            (tmp_path / "mark").unlink()
            finish("train.py", *gan, *killed, saves, f"run_dir={tmp_path / name}")
        done = finish("train.py", *gan, *killed, saves, "resume=auto", f"run_dir={tmp_path / name}")
        assert done.code == 0, done.output
        hashes.append((tmp_path / name / "result.json").read_text().split('"param_sha256": ')[1])
    assert hashes[0] == hashes[1]


class Student(nn.Module):
    """A student and a frozen teacher, each of which is a unit under fsdp."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(64, 6), nn.Linear(64, 6).requires_grad_(False)
        self.fsdp_units = [self.student, self.teacher]

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.teacher(images.flatten(1))
        return self.student(images.flatten(1)), wanted


class Follows:
    """Moves the teacher towards its student after each step, by a step-dependent fraction, with noise."""

    rate = 1.0

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []
        self.ended: list[int] = []

    def begin_step(self, step: int, last_step: int) -> None:
        self.begun.append((step, last_step))
        self.rate = 1 / step

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(*model(batch[0])) + model(batch[0])[0].square().mean()

    def end_step(self, model: Any, step: int) -> None:
        self.ended.append(step)
        assert all(p.grad is None for p in model.parameters())
        noise = torch.rand(()).item()
        for mine, theirs in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            mine.lerp_(theirs, self.rate * noise)


def followed(folder: Path, *overrides: str) -> list[Any]:
    """Return the calls in a resumed run, and the difference between the teacher and one moved by hand."""
    run = (
        *("logger=jsonl", "data=own", "data.dataset._target_=trainer.data.digits.Digits", "model=own"),
        *("data.task._target_=tests.training.test_task_steps.Follows", "train.max_steps=4"),
        *("model._target_=tests.training.test_task_steps.Student", "checkpoint.every_steps=2"),
        *(
            "train.eval_every_epochs=0",
            "checkpoint.keep_last=9",
            "train.micro_batch_size=16",
            *overrides,
            f"run_dir={folder}",
        ),
    )
    first = train(*run)
    with context_of(*run, f"resume={folder}/checkpoints/step_00000002") as context:
        model: Any = context.state.model
        off = []
        for _ in steps_of(context):
            pairs = zip(model.teacher.parameters(), model.student.parameters(), strict=True)
            off.append(max(float((to_local(a) - to_local(b)).abs().max()) for a, b in pairs))
        from trainer.report.run_hash import parameters_sha256

        calls = [context.task.begun, context.task.ended]  # type: ignore[attr-defined]
        return [*calls, min(off) > 0, first["param_sha256"] == parameters_sha256(model)]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_teacher_is_updated_and_steps_continue_after_a_resume(way: str, tmp_path: Path) -> None:
    world, strategy, *_ = WAYS[way]
    for found in run_ranks(followed, world, tmp_path, strategy, init=False):
        assert found == [[(3, 4), (3, 4), (4, 4)], [3, 4], True, True]
    said = (tmp_path / "train.log").read_text()
    assert "task.begun" in said and "task.rate" not in said, "what begin_step sets is not said to be unsaved"


class Jolts(Follows):
    """Moves the student's weights before step 3."""

    def begin_step(self, step: int, last_step: int, model: Any = None) -> None:
        super().begin_step(step, last_step)
        if step == 3:
            model.student.weight.data.add_(1)


@pytest.mark.slow
def test_an_async_save_excludes_changes_by_the_next_begin_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "use", lambda device: time.sleep(0.3))  # the copy begins late
    saved = []
    for in_background in ("false", "true"):
        run_dir = tmp_path / in_background
        train(
            *("logger=jsonl", "data=own", "data.dataset._target_=trainer.data.digits.Digits", "model=own"),
            *("data.task._target_=tests.training.test_task_steps.Jolts", "train.max_steps=3"),
            *("model._target_=tests.training.test_task_steps.Student", "checkpoint.every_steps=2"),
            *("train.eval_every_epochs=0", "strategy=single", f"checkpoint.async={in_background}"),
            f"run_dir={run_dir}",
        )
        saved.append(verified(run_dir / "checkpoints" / "step_00000002").read("model."))
    assert all(saved[0][name].equal(saved[1][name]) for name in saved[0])
