"""trainer.diff names the cause that was injected into one of two runs."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.programs import finish
from tests.ranks import ROOT
from trainer.diff.compare_traces import differences, units

CODE = """
import torch
from torch import nn
from tests.user_parts import Stripes

class Data(Stripes):
    def __init__(self, split):
        super().__init__(split)
        self.rows[BAD, 0] = 50.0

class Act(nn.Module):
    def forward(self, x):
        return torch.tanh(x)

class Pool(nn.Module):
    def forward(self, x):
        return x, x.mean()

class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.encoder, self.act, self.pool, self.drop = nn.Linear(6, 16), Act(), Pool(), nn.Dropout(dropout)
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.norm(self.drop(self.pool(self.act(self.encoder(x)))[0])))

def order(dataset, generator):
    return torch.randperm(len(dataset), generator=generator)
"""
BAD = int(torch.randperm(128, generator=torch.Generator().manual_seed(0))[6 * 16 + 5])  # in step 7
CODE = CODE.replace("BAD", str(BAD))
SMALL = ("logger=jsonl", "data.dataset._target_=mine.Data", "train.epochs=9", "train.global_batch_size=16")
SMALL += ("model._target_=mine.Net", "~model.hidden", "~model.input_shape", "~model.num_classes")
SMALL += ("optim=adamw", "optim.lr=0.01", "schedule=constant", "checkpoint.every_epochs=null")
SMALL += ("checkpoint.every_steps=4", "checkpoint.keep_last=9", "train.eval_every_epochs=0")
SMALL += ("+model.dropout=0.0", "'data.order={_target_: mine.order, _partial_: true}'".strip("'"))

HUGE = (f"self.rows[{BAD}, 0] = 50.0", f"self.rows[{BAD}] = 1e4")
NAN = ("return torch.tanh(x)", "return torch.where(x.abs() > 5, torch.nan, torch.tanh(x))")
REVERSED = ("generator=generator)", "generator=generator).flip(0)")
PATCHED = ("class Data", "tanh = torch.tanh\ntorch.tanh = lambda x: tanh(x) * 1.000001\n\nclass Data")
NO_DECAY = "optim.no_decay=null"

CAUSES = {
    "a huge sample": ([HUGE], (), rf"step 7, tensor 1 of 2 in the batch: .* in sample {BAD}\b"),
    "a NaN of a layer": ([NAN], (), rf"step 7, output of act: .* in sample {BAD}\b"),
    "another seed": ([], ("seed=1",), r"step 1, encoder.weight before the step"),
    "another order": ([REVERSED], (), r"step 1, samples: 16 of 16"),
    "a patched function": ([PATCHED], (), r"step 1, output of act"),
    "dropout": ([], ("model.dropout=0.1",), r"step 1, output of drop"),
    "weight decay on biases": ([], (NO_DECAY,), r"step 1, weight_decay of encoder.bias: 0.0 and 0.1"),
    "eps": ([], ("+optim.eps=1e-6",), r"step 1, eps of encoder.weight: 1e-08 and 1e-06"),
    "bf16": (
        [],
        ("train.precision=bf16",),
        r"step 1, output of encoder.*torch.float32 and torch.bfl",
    ),
}


def made(folder: Path, changes: Sequence[tuple[str, str]], *overrides: str, steps: int = 10) -> Path:
    """Train in `folder`, which contains the user's code."""
    code = CODE
    for old, new in changes:
        assert old in code
        code = code.replace(old, new)
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(code)
    run = folder / "run"
    argv = (*SMALL, f"run_dir={run}", f"train.max_steps={steps}", *overrides)
    ended = finish(str(ROOT / "train.py"), *argv, cwd=folder, forks=True)
    assert ended.code in (0, 3), ended.output
    return run


def compared(one: Path, other: Path, *options: str) -> tuple[int, str]:
    """Return the exit status and the output of the command."""
    argv = (str(one), str(other), "--folders", str(one.parent), str(other.parent), *options)
    ended = finish("-m", "trainer.diff", *argv, forks=True)
    assert ended.code in (0, 1), ended.output
    print(ended.stdout)
    return ended.code, ended.stdout


def first(output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith("first"))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("good"), [])


@pytest.mark.slow
@pytest.mark.parametrize("cause", CAUSES)
def test_an_injected_cause_is_named(cause: str, good: Path, tmp_path: Path) -> None:
    changes, overrides, expected = CAUSES[cause]
    code, output = compared(good, made(tmp_path / "bad", changes, *overrides))
    assert code == 1
    assert re.search(expected, first(output)), output
    assert "NOT as recorded" not in output
    if changes:
        assert re.search(r"^  mine  +[0-9a-f]{16}  [0-9a-f]{16}$", output, re.MULTILINE)


@pytest.mark.slow
def test_a_resume_with_another_order_is_named(good: Path, tmp_path: Path) -> None:
    made(tmp_path / "bad", [], steps=8)
    other = made(tmp_path / "bad", [REVERSED], "resume=auto")
    code, output = compared(good, other)
    assert code == 1
    assert re.search(r"step 9, samples: 16 of 16", first(output)), output


@pytest.mark.slow
def test_equal_runs_need_no_replay(good: Path, tmp_path: Path) -> None:
    code, output = compared(good, made(tmp_path / "same", []))
    assert code == 0
    assert "records      equal in all 10 steps" in output
    assert "replay" not in output


@pytest.mark.slow
def test_runs_from_a_checkpoint_of_another_run(good: Path, tmp_path: Path) -> None:
    start = (f"resume={good}/checkpoints/step_00000004", "train.skip_steps=[[5,5]]")
    one = made(tmp_path / "one", [], *start, steps=7)
    code, output = compared(one, made(tmp_path / "other", [], *start, "optim.lr=0.02", steps=7))
    assert code == 1
    assert re.search(r"step 6, lr of encoder.weight: 0.01 and 0.02", first(output)), output
    assert not (one / "replay").exists(), "diff leaves runs as they were"


@pytest.mark.slow
def test_changes_since_the_runs_are_reported(good: Path, tmp_path: Path) -> None:
    other = made(tmp_path / "bad", [PATCHED])
    (other.parent / "mine.py").write_text(CODE)
    code, output = compared(good, other)
    assert code == 1
    assert re.search(r"replay B .*NOT as recorded: loss of step 3 .*changed code: mine", output), output
    assert "first        no difference in the replayed steps" in output


@pytest.mark.slow
def test_fsdp_and_ddp_are_equal_within_a_tolerance(tmp_path: Path) -> None:
    """A cause is found among differences by rounding, which are not reported."""
    two = ("launch=local", "launch.processes=2", "distributed.device=cpu", "train.micro_batch_size=4")
    fsdp = ("strategy=fsdp", "strategy.unit_min_params=1")
    ddp = made(tmp_path / "ddp", [], *two, "strategy=ddp")
    assert compared(ddp, made(tmp_path / "fsdp", [], *two, *fsdp), "--tolerance", "1000")[0] == 0
    code, output = compared(ddp, made(tmp_path / "bad", [], *two, *fsdp, NO_DECAY), "--tolerance", "1000")
    assert code == 1
    assert re.search(r"step 1, weight_decay of encoder.bias", first(output)), output


def test_units_in_the_last_place() -> None:
    """Units are those of the element, or of the tensor near 0, in the less precise dtype; NaN equals NaN."""
    one = torch.tensor([1.0, 4.0, 1e-9, torch.nan, 2.0])
    other = torch.tensor([1.0 + 2**-23, 4.0, 2e-9, torch.nan, torch.inf])
    apart, _ = units(one, other)
    assert apart[1] == 0 and apart[3] == 0 and apart[4] == torch.inf
    assert 0 < apart[0] <= 1 and 0 < apart[2] < 0.02
    assert units(torch.tensor([1.0]), torch.tensor([1.0 + 2**-7]).bfloat16())[0].item() == 1
    assert units(torch.tensor([3, 5]), torch.tensor([3, 9]))[0].tolist() == [0, 4]


def test_an_entry_in_only_one_run_is_a_difference() -> None:
    same = {"kind": "outputs", "name": "output of a", "hash": "1"}
    more = {"kind": "outputs", "name": "output of b", "hash": "2"}
    found, counts = differences([same], [same, more], 0)
    assert [each.words for each in found] == ["only in B"]
    assert counts["outputs"] == 1
    assert differences([same], [same], 0)[0] == []
