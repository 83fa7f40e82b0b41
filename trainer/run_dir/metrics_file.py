"""Machine-readable metrics of a run: metrics.jsonl, with a JSON object per log step, and result.json."""

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.files.untrusted import load_json
from trainer.files.writing import atomic_file, output_file

FILE = "metrics.jsonl"


class MetricsFile:
    """The writer of metrics.jsonl, on rank 0. If the run is killed, only the last line can be incomplete.

    Lines for steps after `steps_before`, which a resumed run repeats, are removed, and so is a result.json
    for a later step.
    """

    def __init__(self, run_dir: Path, steps_before: int) -> None:
        path = run_dir / FILE
        kept = [line for line in _lines(path) if line["step"] <= steps_before]
        rows = [json.dumps(line).encode() + b"\n" for line in kept]
        with atomic_file(path) as file:
            file.writelines(rows)
        if (_steps(run_dir) or 0) > steps_before:
            (run_dir / RESULT).unlink()
        self._descriptor = os.open(path, os.O_WRONLY)
        self._end = os.lseek(self._descriptor, 0, os.SEEK_END)
        # A run that was stopped before an evaluation adds its metrics to the last line.
        self._last: dict[str, Any] = kept[-1] if kept else {"step": None}
        self._last_at = self._end - sum(map(len, rows[-1:]))

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Add `values` to the line of `step`, the last step or a later one; NaN and Inf become null."""
        if self._last["step"] != step:
            self._last, self._last_at = {"step": step}, self._end
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._last |= finite
        line = json.dumps(self._last).encode() + b"\n"
        written = os.pwrite(self._descriptor, line, self._last_at)
        if written < len(line):  # a full disk accepts a part, and raises an error for the rest
            os.pwrite(self._descriptor, line[written:], self._last_at + written)
        self._end = self._last_at + len(line)

    def close(self) -> None:
        os.close(self._descriptor)


def read_metrics(run_dir: Path) -> dict[str, dict[int, float]]:
    """Return every scalar of a run by name and step; {} if there is no file. NaN stands for NaN or Inf."""
    found: dict[str, dict[int, float]] = {}
    for line in _lines(run_dir / FILE):
        for name, value in line.items():
            if name != "step" and isinstance(value, int | float | None):
                found.setdefault(name, {})[line["step"]] = math.nan if value is None else value
    return found


def last_metrics(run_dir: Path) -> dict[str, Any]:
    """Return the last value of each scalar in the last 64 KiB, and the last `step`; {} if there is none."""
    last: dict[str, Any] = {}
    for line in _lines(run_dir / FILE, at_most=1 << 16):
        last |= line
    return last


def _lines(path: Path, at_most: int | None = None) -> list[dict[str, Any]]:
    """Return the complete lines in the last `at_most` bytes (None: all) of a file."""
    lines = []
    try:
        with path.open("rb") as file:
            if at_most is not None:
                file.seek(max(0, file.seek(0, os.SEEK_END) - at_most))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    for line in text.splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and isinstance(values.get("step"), int):
            lines.append(values)
    return lines


RESULT = "result.json"


def write_result(run_dir: Path, result: dict[str, Any], made_steps: bool) -> None:
    """Write `result` atomically. If the run made no new steps, keep its existing file."""
    if not made_steps and _steps(run_dir) == result["steps"]:
        return
    with output_file(run_dir / RESULT, replace=True) as file:
        file.write(json.dumps(result, indent=2).encode() + b"\n")


def _steps(run_dir: Path) -> int | None:
    with contextlib.suppress(OSError, UserError):
        steps = load_json(run_dir / RESULT).get("steps")
        return steps if isinstance(steps, int) else None
    return None
