"""Comparing runs by their files, written here by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runs import settings
from trainer.compare import main
from trainer.config import to_yaml
from trainer.errors import UserError
from trainer.sweep.comparison import compare, parts_at, read_runs

METRICS = {"strategy": "ddp", "comm": "native", "world_size": 2, "steps": 40, "eval/loss": 0.5}
METRICS |= {"param_sha256": "aa", "samples_per_second": 1.0, "peak_memory_bytes": 2**28}


def write(
    folder: Path, *overrides: str, ms: float = 4.0, gap: float = 0.0, sha: str = "aa", **result: Any
) -> str:
    """A run of four log windows; its loss is off by `gap` from step 30 on."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(settings(*overrides)))
    metrics = METRICS | {"train/loss": 0.5 + gap, "samples_per_second": 64e3 / ms}
    metrics |= {"ms_per_step": ms, "param_sha256": sha * 32, **result}
    (folder / "result.json").write_text(json.dumps(metrics))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in (10, 20, 30, 40):
            values = {"train/loss": 1 / step + gap * (step >= 30), "train/grad_norm": 1.0}
            values |= {"speed/ms_per_step/step": ms * (9 if step == 10 else 1 + step / 1000)}
            values |= {"comm/total_ms": 3.0, "comm/hidden_ms": 2.0, "comm/exposed_ms": 1.0}
            file.write(json.dumps({"step": step, **values}) + "\n")
    return str(folder)


@pytest.mark.slow
def test_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        write(tmp_path / "a"),
        write(tmp_path / "b", ms=2.0),
        write(tmp_path / "c", ms=4.2, gap=0.25, sha="bb"),
    ]
    assert main([*runs, "--plot", str(tmp_path / "plot.png")]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines() if line}
    assert rows["a"].split()[3:7] == ["4.12", "±", "0.02", "16000"]  # the first window warms up
    assert rows["b"].split()[-3:] == ["aaaaaaaaaaaa", "never", "0"]
    assert rows["c"].split()[-4:] == ["bbbbbbbbbbbb", "step", "30", "0.25"]
    assert rows["c"].split()[8:11] == ["3.00", "2.00", "1.00"]
    assert rows["verdict:"] == (
        "verdict: b is fastest, 2.00 x as fast as the next, a; equal to the last bit: the models of a, b; "
        "loss of the others is at most 0.25 away"
    )
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_a_difference_within_the_spread_is_none(tmp_path: Path) -> None:
    runs = read_runs([write(tmp_path / "a"), write(tmp_path / "b", ms=4.01)])
    assert (
        "a is fastest, 1.00 x as fast as the next, b (within their spread: no difference shown)"
        in compare(runs)
    )
    assert parts_at(*runs) is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.global_batch_size=32", "train.global_batch_size 64 and 32"),
        ("seed=1", "seed 0 and 1"),
    ],
)
def test_what_is_unlike_is_flagged(override: str, words: str, tmp_path: Path) -> None:
    said = compare(read_runs([write(tmp_path / "a"), write(tmp_path / "b", override)]))
    assert f"not alike: a and b: {words}" in said
    assert "no two runs are alike enough to compare their models" in said


def test_other_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write(tmp_path / "a"), write(tmp_path / "b", "data=fake")]) == 2
    assert (
        "a and b cannot be compared: data.dataset._target_ trainer.data.digits.Digits and"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("config.yaml", "[1]", "holds no settings"),
        ("result.json", "{}", "its result.json has no comm"),
    ],
)
def test_what_is_no_run_is_one_message(file: str, text: str, words: str, tmp_path: Path) -> None:
    runs = [write(tmp_path / "a"), write(tmp_path / "b")]
    at = Path(runs[1], file)
    at.write_text(text)
    with pytest.raises(UserError, match=words):
        compare(read_runs(runs))


def test_a_file_or_a_picture_nowhere_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write(tmp_path / "a"), write(tmp_path / "b")]
    assert main([runs[0], f"{runs[1]}/result.json"]) == 2
    assert main([*runs, "--plot", str(tmp_path / "x.nothing")]) == 2
    assert "--plot" in capsys.readouterr().err


def test_a_sweep_stands_for_its_trials_that_are_done(tmp_path: Path) -> None:
    rows = []
    for number, state in enumerate(("done", "failed", "done")):
        name = f"00{number}"
        if state == "done":
            write(tmp_path / name)
        row = {"trial": number, "overrides": [], "seed": number, "folder": name, "swept": {}, "state": state}
        rows.append({**row, "status": 0, "value": 1.0, "seconds": 1.0, "time": "now"})
    (tmp_path / "trials.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [run.name for run in read_runs([str(tmp_path)])] == ["000", "002"]
    with pytest.raises(UserError, match="001 is not a finished run: it has no config"):
        read_runs([str(tmp_path / "000"), str(tmp_path / "001")])
    with pytest.raises(UserError, match="two are needed to compare"):
        read_runs([str(tmp_path / "000")])


@pytest.mark.slow
def test_exact_runs_that_had_to_be_equal(tmp_path: Path) -> None:
    exact = {"leaves": 8, "ground": {"the CPU": "one"}, "since": 0}
    one = write(tmp_path / "one", "train.exact=8", exact=exact)
    other = write(tmp_path / "other", "train.exact=8", "strategy=fsdp", exact=exact, sha="bb")
    broken = "; other had to be equal by train.exact (leaves, environment, settings): a defect of this program, or a"
    assert broken in compare(read_runs([one, other]))
    moved = {**exact, "ground": {"the CPU": "another"}}
    elsewhere = write(tmp_path / "elsewhere", "train.exact=8", exact=moved, sha="bb")
    wider = write(tmp_path / "wider", "train.exact=8", "model.hidden=[9]", exact=exact, sha="bb")
    same = write(tmp_path / "same", "train.exact=8", exact=exact)
    for run in (elsewhere, wider, same):
        assert "had to be equal" not in compare(read_runs([one, run]))
