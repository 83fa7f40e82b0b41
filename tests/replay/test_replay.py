"""The records of runs, and trainer.replay: a repeated step has the bits of the run, and its NaN is found."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.programs import finish
from tests.ranks import run_ranks
from tests.runs import train
from tests.user_parts import Stripes, Tiny
from trainer.errors import NonFiniteError, UserError
from trainer.replay.report import replay
from trainer.run_dir.attempts import attempt_of, read_attempts
from trainer.run_dir.metrics_file import read_metrics
from trainer.run_dir.steps_file import FILE, read_steps

HERE = "tests.replay.test_replay"
SMALL = ("logger=jsonl", "data.dataset._target_=tests.user_parts.Stripes", "train.epochs=9")
SMALL += ("model._target_=tests.user_parts.Normed", "~model.hidden", "~model.input_shape")
SMALL += ("~model.num_classes", "train.global_batch_size=16", "optim.lr=0.01", "train.max_steps=20")
SMALL += ("checkpoint.every_steps=4", "checkpoint.keep_last=9", "checkpoint.every_epochs=null")
SMALL += ("train.log_every_steps=7", "train.check_replicas_every=3")
BAD_STEP, LAST_SAVE = 7, 4
BAD = int(torch.randperm(128, generator=torch.Generator().manual_seed(0))[(BAD_STEP - 1) * 16 + 5])


class Huge(Stripes):
    """Has a huge negative value in a sample of step `BAD_STEP`."""

    def __init__(self, split: str) -> None:
        super().__init__(split)
        if split == "train":
            self.rows[BAD] = -1e4


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 100).sqrt()


class Rooted(Tiny):
    """`root` gives NaN for a huge negative value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(0, nn.Identity())
        self.layers.insert(1, Root())


class _Edge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=-50)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x < -50, torch.nan, gradient)


class Edge(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Edge.apply(x)


class Edged(Tiny):
    """`layers.1` gives a finite output for a huge negative value, but a gradient of NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, Edge())


BAD_DATA = (f"data.dataset._target_={HERE}.Huge",)
FORWARD = (*BAD_DATA, f"model._target_={HERE}.Rooted")
BACKWARD = (*BAD_DATA, f"model._target_={HERE}.Edged")


def hashes(folder: Path) -> dict[str, str]:
    """Return a hash of each file of a run outside replay/."""
    files = (path for path in folder.rglob("*") if path.is_file() and "replay" not in path.parts)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def made(run_dir: Path, *overrides: str) -> str:
    """Train, and return the result or the error."""
    try:
        return str(train(*SMALL, f"run_dir={run_dir}", *overrides)["param_sha256"])
    except NonFiniteError as error:
        return str(error)


def shown(run_dir: Path, step: int, *overrides: str) -> bool:
    return replay(run_dir, step, overrides, None, saves_batch=False)


def made_and_shown(run_dir: Path, step: int, *overrides: str) -> bool:
    made(run_dir, *overrides)
    torch.set_num_threads(2)  # the run had 1
    return shown(run_dir, step) and torch.get_num_threads() == 1


def report_of(run_dir: Path, step: int) -> Any:
    return json.loads((run_dir / "replay" / f"step_{step:08d}" / "report.json").read_text())


def rows_of(run_dir: Path, step: int, name: str) -> list[list[str]]:
    lines = (run_dir / "replay" / f"step_{step:08d}" / f"{name}.csv").read_text().splitlines()
    return [line.split(",") for line in lines[1:]]


def test_each_step_is_recorded_and_the_log_is_the_mean_of_the_records(tmp_path: Path) -> None:
    """Also after a resume, which repeats steps; a truncated record is replaced."""
    run_ranks(made, 1, tmp_path, "strategy=single", "train.skip_steps=[[9,10]]", init=False)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b"cut")
    before = read_steps(tmp_path)
    saved = f"resume={tmp_path}/checkpoints/step_00000008"
    run_ranks(made, 1, tmp_path, "strategy=single", saved, init=False)
    records = read_steps(tmp_path)
    assert list(before) == list(records) == [*range(1, 21)]
    assert all(records[step] == before[step] for step in range(1, 9))
    assert {step for step in before if math.isnan(before[step].loss + before[step].grad_norm)} == {9, 10}
    logged = read_metrics(tmp_path)
    assert logged["train/loss"][7] == pytest.approx(sum(records[step].loss for step in range(1, 8)) / 7)
    assert logged["train/grad_norm"][14] == pytest.approx(records[14].grad_norm, rel=1e-6)
    assert [each.first_step for each in read_attempts(tmp_path)] == [0, 8]
    attempt = attempt_of(tmp_path, 9)
    assert attempt is not None and attempt.first_step == 8
    assert attempt.code["tests.user_parts"] and not any(name.startswith("trainer") for name in attempt.code)


def test_the_records_of_exact_runs_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    for world_size in (1, 2):
        run_ranks(made, world_size, tmp_path / str(world_size), "strategy=ddp", "train.exact=4", init=False)
    one, two = ((tmp_path / name / FILE).read_bytes() for name in "12")
    assert one == two and len(one) == 20 * 16
    one, two = (read_metrics(tmp_path / name)["weights_hash"] for name in "12")
    assert one == two and [*one] == [3, 4, 6, 8, 9, 12, 15, 16, 18, 20] and len({*one.values()}) == 10


@pytest.mark.parametrize(
    ("ranks", "again", "overrides"),
    [
        (1, 1, ("strategy=single",)),
        pytest.param(2, 2, ("strategy=ddp",), marks=pytest.mark.slow),
        pytest.param(2, 2, ("strategy=fsdp",), marks=pytest.mark.slow),
        pytest.param(2, 1, ("strategy=ddp", "train.exact=4"), marks=pytest.mark.slow),
        pytest.param(1, 2, ("strategy=fsdp", "train.exact=4"), marks=pytest.mark.slow),
    ],
    ids=["single", "ddp", "fsdp", "exact_on_fewer", "exact_on_more"],
)
def test_a_nan_is_found_with_its_sample_and_module(
    ranks: int, again: int, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    (ended, *_) = run_ranks(made, ranks, tmp_path, *overrides, *FORWARD, init=False)
    assert f"loss of step {BAD_STEP} is NaN" in ended
    before = hashes(tmp_path)
    assert run_ranks(shown, again, tmp_path, BAD_STEP, init=False) == [True] * again
    assert hashes(tmp_path) == before
    report = report_of(tmp_path, BAD_STEP)
    assert report["summary"]["record"].startswith(f"equal, bit for bit, in steps 5 to {BAD_STEP - 1};")
    found = report["non_finite"]
    assert (found["direction"], found["module"], found["samples"]) == ("forward", "layers.1", [BAD])
    samples = rows_of(tmp_path, BAD_STEP, "samples")
    assert len(samples) == 16 and samples[0][0] == str(BAD) and samples[0][-1] == "nan"
    losses = [float(row[-1]) for row in samples[1:]]
    assert losses == sorted(losses, reverse=True) and losses[0] < 10


def test_a_nan_that_arises_in_the_backward_pass_is_found(tmp_path: Path) -> None:
    assert run_ranks(made_and_shown, 1, tmp_path, BAD_STEP, "strategy=single", *BACKWARD, init=False) == [
        True
    ]
    found = report_of(tmp_path, BAD_STEP)["non_finite"]
    assert (found["direction"], found["module"], found["samples"]) == ("backward", "layers.1", [BAD])


MANY = ("ema.decay=0.9", "train.micro_batch_size=4", "data.num_workers=1", "schedule=plateau")
MANY += ("train.eval_every_steps=3", "train.clip_grad_norm=0.5")


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (1, ("strategy=single", *MANY)),
        (1, ("strategy=single", "train.precision=fp16")),
        pytest.param(2, ("strategy=ddp", "comm=ring", *MANY), marks=pytest.mark.slow),
    ],
    ids=["many", "fp16", "ddp"],
)
def test_a_replay_is_bit_identical_to_the_run(ranks: int, overrides: tuple[str, ...], tmp_path: Path) -> None:
    """With the end of an epoch, evaluations that lower the learning rate, batch norm, other threads."""
    shown_well = run_ranks(made_and_shown, ranks, tmp_path, 19, *overrides, init=False)
    assert shown_well == [True] * ranks
    assert report_of(tmp_path, 19)["summary"]["record"] == "equal, bit for bit, in steps 17 to 19"
    record = read_steps(tmp_path)[19]
    norms = [float(row[1]) for row in rows_of(tmp_path, 19, "parameters")]
    assert math.hypot(*norms) == pytest.approx(record.grad_norm, rel=1e-5)
    mean = sum(float(row[-1]) for row in rows_of(tmp_path, 19, "samples")) / 16
    assert mean == pytest.approx(record.loss, rel=0.5)  # batch norm has its running statistics there


def different(run_dir: Path) -> bool:
    made(run_dir, "strategy=single")
    return shown(run_dir, 10, "train.clip_grad_norm=0.01")


def test_a_difference_is_reported_with_its_reason(tmp_path: Path) -> None:
    (equal,) = run_ranks(different, 1, tmp_path, init=False)
    summary = report_of(tmp_path, 10)["summary"]
    assert not equal and summary["record"].startswith("DIFFERENT: step 9, weights_hash was ")
    assert summary["reasons"] == "overrides: train.clip_grad_norm=0.01"
    slower = finish("-m", "trainer.replay", str(tmp_path), "--step", "10", "optim.lr=1e-9", forks=True)
    assert slower.code == 1 and "overrides: optim.lr=1e-9" in slower.stdout
    argv = (str(tmp_path), "--step", "10", "train.skip_steps=[[9,12]]")
    refused = finish("-m", "trainer.replay", *argv, forks=True).output
    assert "step 10 was skipped because of train.skip_steps=[[9, 12]]" in refused
    argv = (str(tmp_path), "--step", "10", "--from", f"{tmp_path}/checkpoints/step_00000012")
    refused = finish("-m", "trainer.replay", *argv, forks=True).output
    assert "step_00000012 already contains step 10; pass an earlier checkpoint" in refused


def refused(run_dir: Path) -> str:
    with pytest.raises(UserError) as error:
        shown(run_dir, 10)
    return str(error.value)


@pytest.mark.slow
def test_another_number_of_ranks_is_refused_with_the_command(tmp_path: Path) -> None:
    run_ranks(made, 2, tmp_path, "strategy=ddp", init=False)
    (message,) = run_ranks(refused, 1, tmp_path, init=False)
    assert message.endswith(
        f"run torchrun --standalone --nproc_per_node=2 -m trainer.replay {tmp_path} --step 10"
    )
