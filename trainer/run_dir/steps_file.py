"""The loss and the gradient norm of each step of a run: steps.bin, with 16 bytes per step."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

FILE = "steps.bin"
_RECORD = np.dtype([("step", "<u4"), ("grad_norm", "<f4"), ("loss", "<f8")])


class StepRecord(NamedTuple):
    """The exact numbers that a run computed in a step; they are the same on all ranks."""

    step: int
    grad_norm: float
    """Before clipping, in fp32; NaN if the step was skipped."""
    loss: float
    """Mean over all ranks; NaN if the step was skipped."""


class StepsFile:
    """Writes steps.bin, on rank 0, without the steps after `steps_before`, which a resumed run repeats."""

    def __init__(self, run_dir: Path, steps_before: int) -> None:
        path = run_dir / FILE
        records = _read(path)
        kept = int((records["step"] <= steps_before).sum())  # steps are in ascending order
        self._file = path.open("ab")
        self._file.truncate(kept * _RECORD.itemsize)

    def write(self, records: Sequence[StepRecord]) -> None:
        """Append records of consecutive steps."""
        self._file.write(np.array([*map(tuple, records)], _RECORD).tobytes())
        self._file.flush()  # raises an error if a full disk accepts only a part

    def close(self) -> None:
        self._file.close()


def read_steps(run_dir: Path) -> dict[int, StepRecord]:
    """Return the records of a run by step, in ascending order; {} if there is no file.

    The last steps before a failure are missing, because records are written at log steps and saves.
    """
    return {record[0]: StepRecord(*record) for record in _read(run_dir / FILE).tolist()}


def _read(path: Path) -> np.ndarray:
    data = path.read_bytes() if path.exists() else b""
    return np.frombuffer(data[: len(data) // _RECORD.itemsize * _RECORD.itemsize], _RECORD)
