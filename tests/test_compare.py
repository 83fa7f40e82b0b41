"""Comparing runs by their files, written here by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runs import settings
from trainer.compare import compare, main, read_runs
from trainer.config import to_yaml
from trainer.errors import UserError
from trainer.sweep.trials import DONE, TrialLog

METRICS = {"strategy": "ddp", "comm": "native", "world_size": 2, "steps": 40, "eval/loss": 0.5}
METRICS |= {"param_sha256": "aa", "samples_per_second": 1.0, "peak_memory_bytes": 2**28}


def write(
    folder: Path,
    *overrides: str,
    ms: float = 4.0,
    gap: float = 0.0,
    sha: str = "aa",
    windows: int = 6,
    **result: Any,
) -> str:
    """A run of log windows of ten steps; its loss is off by `gap` from step 30 on."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(settings(*overrides)))
    metrics = METRICS | {"train/loss": 0.5 + gap, "samples_per_second": 64e3 / ms}
    metrics |= {"ms_per_step": ms, "param_sha256": sha * 32, **result}
    (folder / "result.json").write_text(json.dumps(metrics))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(10, 10 * windows + 10, 10):
            values = {"train/loss": 1 / step + gap * (step >= 30), "train/grad_norm": 1.0}
            values |= {"speed/ms_per_step/step": ms * (9 if step == 10 else 1 + step / 1000)}
            values |= {"comm/total_ms": 3.0, "comm/overlapped_ms": 2.0, "comm/exposed_ms": 1.0}
            file.write(json.dumps({"step": step, **values}) + "\n")
    return str(folder)


def test_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        write(tmp_path / "a"),
        write(tmp_path / "b", ms=2.0),
        write(tmp_path / "c", ms=4.2, gap=0.25, sha="bb"),
    ]
    assert main(runs) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines()[:-1] if line}
    assert rows["a"].split()[4:8] == ["4.16", "±", "0.04", "16000"]  # the first window warms up
    assert rows["b"].split()[-3:] == ["aaaaaaaaaaaa", "none", "0"]
    assert rows["c"].split()[-4:] == ["bbbbbbbbbbbb", "step", "30", "0.25"]
    assert rows["c"].split()[9:12] == ["3.00", "2.00", "1.00"]
    assert out.splitlines()[-1] == (
        "b is fastest, 2.00 x (1.96 to 2.04) as fast as the next, a; equal to the last bit: the models of a, b"
    )


def test_the_lowest_loss_is_named(tmp_path: Path) -> None:
    runs = read_runs([write(tmp_path / "a"), write(tmp_path / "b", **{"eval/loss": 0.25})])
    assert "; b has the lowest eval/loss, 0.25; " in compare(runs)


def test_a_run_that_diverged_in_evaluation_has_no_loss(tmp_path: Path) -> None:
    """result.json has null, and metrics.jsonl an evaluation before it that was good."""
    folder = write(tmp_path / "b", **{"eval/loss": None})
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 70, "eval/loss": 0.01}\n{"step": 80, "eval/loss": null}\n')
    said = compare(read_runs([write(tmp_path / "a"), folder]))
    assert "0.01" not in said.replace("0.010", "") and "lowest" not in said


def test_a_difference_within_the_spread_is_none(tmp_path: Path) -> None:
    runs = read_runs([write(tmp_path / "a"), write(tmp_path / "b", ms=4.01)])
    assert (
        "a is fastest, 1.00 x (0.98 to 1.02) as fast as the next, b (within their spread: no difference shown)"
        in compare(runs)
    )


def test_no_ratio_is_told_from_few_windows(tmp_path: Path) -> None:
    """Of six, the first is warm-up."""
    said = compare(read_runs([write(tmp_path / "a"), write(tmp_path / "b", ms=2.0, windows=5)]))
    assert (
        "no comparison of speed, because fewer than 5 log windows follow the first one in b;" in said
        and "fast" not in said
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.global_batch_size=32", "train.global_batch_size 64 and 32"),
        pytest.param("seed=1", "seed 0 and 1", marks=pytest.mark.slow),
        pytest.param(
            "data=fake", "data.dataset._target_ trainer.data.digits.Digits and", marks=pytest.mark.slow
        ),
    ],
)
def test_what_is_unlike_is_flagged(override: str, words: str, tmp_path: Path) -> None:
    said = compare(read_runs([write(tmp_path / "a"), write(tmp_path / "b", override)]))
    assert f"different: a and b: {words}" in said


def test_what_is_no_run_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write(tmp_path / "a"), write(tmp_path / "b")]
    assert main([runs[0], f"{runs[1]}/result.json"]) == 2
    assert "is not a finished run: it has no result.json" in capsys.readouterr().err
    Path(runs[1], "config.yaml").write_text("a: [")
    assert main(runs) == 2
    assert "config.yaml cannot be read" in capsys.readouterr().err
    Path(runs[1], "result.json").write_text("{")
    assert main(runs) == 2
    assert "b cannot be compared: its result.json is damaged" in capsys.readouterr().err


def test_a_sweep_stands_for_its_trials_that_are_done(tmp_path: Path) -> None:
    log = TrialLog(tmp_path, [], "eval/loss")
    for number, state in enumerate((DONE, "failed", DONE)):
        trial = log.trial({"optim.lr": str(number)})
        trial.state = state
        if state == DONE:
            write(tmp_path / trial.folder)
    log.write()
    assert list(read_runs([str(tmp_path)])) == ["000_lr-0", "002_lr-2"]
    with pytest.raises(UserError, match="two are needed to compare"):
        read_runs([str(tmp_path / "000_lr-0")])
