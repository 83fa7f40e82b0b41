"""benchmarks/gpu.sh: the choice of parts, and a dry run of every part with tiny sizes on the CPU."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.__main__ import _run_in_subprocess, _write
from benchmarks.gpu.day import Day, Row
from benchmarks.gpu.parts import PARTS, chosen

ROOT = Path(__file__).parents[2]


def gpu_sh(*words: str, timeout_s: float) -> str:
    ended = subprocess.run(
        ["benchmarks/gpu.sh", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_first_parts_that_fit_the_budget_are_chosen() -> None:
    for part in PARTS:
        module, _, function = part.function.partition(".")
        assert callable(getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function or "measure"))
        assert part.seconds <= 560, f"{part.name} does not fit into a call of ten minutes"
    assert [part.name for part in chosen(PARTS, 220)] == ["allreduce", "one_hash"]
    assert [part.name for part in chosen(PARTS[2:], 290)][:2] == ["ranks", "all_reduce"], "drill does not fit"
    hour = chosen(PARTS, 2700)
    assert hour[:13] == list(PARTS[:13]) and sum(part.seconds for part in hour) <= 2700


@pytest.mark.slow
def test_a_budget_runs_parts_without_results(tmp_path: Path) -> None:
    def listed() -> list[str]:
        lines = gpu_sh("--list", "--budget", "100", "--out", str(tmp_path), timeout_s=300).splitlines()
        return [line.split()[0] for line in lines]

    assert listed() == ["allreduce", "recorder", "total"]
    (tmp_path / "allreduce.json").write_text(json.dumps({"machine": {"dry": False}}))
    (tmp_path / "recorder.json").write_text(json.dumps({"machine": {"dry": True}}))
    assert listed() == ["all_reduce", "recorder", "total"]
    (tmp_path / "allreduce.json").write_text(json.dumps({"machine": {"dry": False}, "complete": False}))
    assert listed() == ["allreduce", "recorder", "total"], "an interrupted part runs again"
    command = ("--list", "--budget", "20", "--out", str(tmp_path / "new"))
    said = gpu_sh(*command, timeout_s=300)
    assert said.startswith("no part to run: none of them fits into 20 s") and "0 parts" in said
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_an_interrupted_part_has_not_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = next(part for part in PARTS if part.name == "packed")
    day = Day(dry=True, out=tmp_path)
    monkeypatch.chdir(ROOT)
    assert _run_in_subprocess(day, part) == 0
    found = json.loads((tmp_path / "packed.json").read_text())
    assert found["passed"] is not False and len(found["rows"]) == 3
    _write(day, part, [Row("one of three", 1.0, ok=True)], 1.0, complete=False)
    assert json.loads((tmp_path / "packed.json").read_text())["passed"] is False


@pytest.mark.parametrize("how", ["interrupted", "hangs"])
def test_a_part_ends_when_its_call_does(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, it would keep the GPU."""
    part, day, started = PARTS[0], Day(dry=True, out=tmp_path), list[subprocess.Popen[bytes]]()
    popen = subprocess.Popen

    class Sleeps(popen):  # type: ignore[type-arg, misc, valid-type]
        def __init__(self, command: object, **options: Any) -> None:
            super().__init__(["sleep", "60"], **options)
            started.append(self)

        def wait(self, timeout: float | None = None) -> int:
            if timeout == 120:
                raise KeyboardInterrupt if how == "interrupted" else subprocess.TimeoutExpired("", timeout)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Sleeps)
    _write(day, part, [], 1.0, complete=False)
    with pytest.raises(KeyboardInterrupt) if how == "interrupted" else contextlib.nullcontext():
        assert _run_in_subprocess(day, part) == 1
    assert started[0].poll() is not None
    found = json.loads((tmp_path / f"{part.name}.json").read_text())
    assert found["complete"] == (how == "hangs") and found["passed"] is False
    if how == "hangs":
        assert found["rows"][-1]["note"] == "did not end within 120 s"


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_part_runs(tmp_path: Path) -> None:
    gpu_sh("--dry-run", "--budget", "100000", "--out", str(tmp_path), "table", timeout_s=2900)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [part["part"] for part in found["parts"]] == [part.name for part in PARTS]
    assert not found["not_run"]
    for part in found["parts"]:
        assert part["machine"]["dry"] and part["date"] and part["seconds"] >= 0
        assert part["rows"] and part["passed"] is not False, part
