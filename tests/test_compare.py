"""Comparison of runs, whose files the tests write."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
    log_every: int = 10,
    evaluations: Mapping[int, float] | None = None,
    **result: Any,
) -> str:
    """Write a run with a loss that differs by `gap` from step 30 on."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(settings(*overrides)))
    metrics = METRICS | {"train/loss": 0.5 + gap, "samples_per_second": 64e3 / ms}
    metrics |= {"ms_per_step": ms, "param_sha256": sha * 32, **result}
    (folder / "result.json").write_text(json.dumps(metrics))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(log_every, log_every * windows + log_every, log_every):
            values = {"train/loss": 1 / step + gap * (step >= 30), "train/grad_norm": 1.0}
            values |= {"usage/ms_per_step/step": ms * (9 if step == log_every else 1 + step / 1000)}
            values |= {
                "usage/comm/total_ms": 3.0,
                "usage/comm/overlapped_ms": 2.0,
                "usage/comm/exposed_ms": 1.0,
            }
            file.write(json.dumps({"step": step, **values}) + "\n")
        for step, loss in (evaluations or {}).items():
            file.write(json.dumps({"step": step, "eval/loss": loss}) + "\n")
    return str(folder)


def test_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        write(tmp_path / "a"),
        write(tmp_path / "b", ms=2.0),
        write(tmp_path / "c", ms=4.2, gap=0.25, sha="bb"),
    ]
    assert main(runs) == 0
    out = capsys.readouterr().out
    _, speed, weights, summary = out.rstrip().split("\n\n")
    row = {line.split()[0]: line.split() for line in speed.splitlines()}
    assert row["a"][4:7] == ["4.16", "0.04", "16000"]  # the first window warms up
    assert row["c"][8:] == ["3.00", "2.00", "1.00"]
    row = {line.split()[0]: line.split() for line in weights.splitlines()}
    assert row["b"][1:] == ["aaaaaaaaaaaa", "none", "0"]
    assert row["c"][1:] == ["bbbbbbbbbbbb", "step", "30", "0.25"]
    assert summary.splitlines() == [
        "fastest: b, 2.00 times (1.96 to 2.04) as fast as a",
        "weights identical to those of a: b",
    ]


def test_results_lead_with_the_settings_that_differ(tmp_path: Path) -> None:
    runs = [
        write(tmp_path / "a", evaluations={20: 0.9, 40: 0.5}),
        write(tmp_path / "b", "optim.lr=0.5", evaluations={20: 0.4, 40: 0.45}, **{"eval/loss": 0.45}),
    ]
    results, *_, summary = compare(read_runs(runs)).split("\n\n")
    title, header, *rows = (line.split() for line in results.splitlines())
    assert title == ["Results"] and header[:3] == ["run", "optim.lr", "steps"]
    assert rows[0][-2:] == ["0.5", "0.16"]  # 40 steps of 4 ms
    assert rows[1] == ["b", "0.5", "40", "0.5", "0.45", "0.4", "0.08"]
    assert "lowest eval/loss: b, 0.45" in summary


def test_a_difference_within_the_spread_is_not_reported(tmp_path: Path) -> None:
    runs = read_runs([write(tmp_path / "a"), write(tmp_path / "b", ms=4.01)])
    words = "speed: no clear difference: a is 1.00 times (0.98 to 1.02) as fast as b"
    assert words in compare(runs)


def test_speed_is_per_sample(tmp_path: Path) -> None:
    """A step of half the samples in 80 % of the time is slower."""
    runs = read_runs([write(tmp_path / "a"), write(tmp_path / "b", "train.global_batch_size=32", ms=3.2)])
    assert "fastest: a, 1.60 times (1.57 to 1.63) as fast as b" in compare(runs)


def test_means_over_different_steps_are_not_compared(tmp_path: Path) -> None:
    runs = [write(tmp_path / "a"), write(tmp_path / "b", "train.log_every_steps=15", log_every=15, gap=0.25)]
    rows = compare(read_runs(runs)).split("Weights\n")[1].split("\n\n")[0].splitlines()
    assert rows[2].split() == ["b", "aaaaaaaaaaaa"]


def test_the_current_folder_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b")
    monkeypatch.chdir(tmp_path / "a")
    assert list(read_runs([".", "../b"])) == ["a", "b"]


def test_few_windows_give_no_ratio(tmp_path: Path) -> None:
    """The first of six windows is warm-up."""
    said = compare(read_runs([write(tmp_path / "a"), write(tmp_path / "b", ms=2.0, windows=5)]))
    assert "speed: not compared, because fewer than 5 log windows follow the first one in b;" in said
    assert "as fast" not in said


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.global_batch_size=32", "train.global_batch_size (64 and 32)"),
        pytest.param("seed=1", "seed (0 and 1)", marks=pytest.mark.slow),
        pytest.param(
            "data=fake", "data.dataset._target_ (trainer.data.digits.Digits and", marks=pytest.mark.slow
        ),
    ],
)
def test_different_tasks_are_flagged(override: str, words: str, tmp_path: Path) -> None:
    said = compare(read_runs([write(tmp_path / "a"), write(tmp_path / "b", override)]))
    assert f"not comparable: a and b differ in {words}" in said


def test_a_folder_without_a_run_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write(tmp_path / "a"), write(tmp_path / "b")]
    assert main([runs[0], f"{runs[1]}/result.json"]) == 2
    assert "is not a finished run: it has no result.json" in capsys.readouterr().err
    Path(runs[1], "config.yaml").write_text("a: [")
    assert main(runs) == 2
    assert "config.yaml cannot be read" in capsys.readouterr().err
    Path(runs[1], "result.json").write_text("{")
    assert main(runs) == 2
    assert "b cannot be compared: its result.json is damaged" in capsys.readouterr().err


def test_a_sweep_is_replaced_by_its_finished_trials(tmp_path: Path) -> None:
    log = TrialLog(tmp_path, [], "eval/loss")
    for number, state in enumerate((DONE, "failed", DONE)):
        trial = log.trial({"optim.lr": str(number)})
        trial.state = state
        if state == DONE:
            write(tmp_path / trial.folder)
    log.write()
    assert list(read_runs([str(tmp_path)])) == ["000_lr-0", "002_lr-2"]
    with pytest.raises(UserError, match="a comparison needs at least two"):
        read_runs([str(tmp_path / "000_lr-0")])
