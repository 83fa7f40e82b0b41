"""trials.jsonl: what has become of each trial, a row whenever that changes; its last row counts."""

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

FILE = "trials.jsonl"
RUNNING, DONE, FAILED, PRUNED, STOPPED, DIED, MISTAKEN = STATES = (
    "running",  # or the sweep was killed meanwhile
    "done",
    "failed",  # a loss that was not finite: another try would end the same
    "pruned",
    "stopped",  # and saved
    "died",
    "mistaken",
)
FINAL = {DONE, FAILED, PRUNED}


@dataclass
class Trial:
    """One run of a sweep. All its overrides, in whatever order, and the seed are its identity."""

    number: int
    overrides: tuple[str, ...]
    seed: int | None
    folder: str
    swept: dict[str, str] = field(default_factory=dict)
    state: str = STOPPED
    status: int | None = None
    value: float | None = None
    seconds: float = 0.0  # over all attempts

    @property
    def key(self) -> tuple[tuple[str, ...], int | None]:
        return identity(self.overrides, self.seed)


def identity(overrides: Sequence[str], seed: int | None) -> tuple[tuple[str, ...], int | None]:
    """The seed counts once, whether a word of the command line gave it or the settings."""
    return tuple(sorted(word for word in overrides if not word.startswith("seed="))), seed


class Ledger:
    """The trials of a sweep's folder by their key; every change is on the disk before it is acted upon."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trials = {trial.key: trial for trial in read_trials(folder)}

    def trial(self, common: Sequence[str], swept: Sequence[str], seed: int | None) -> Trial:
        """The trial of these overrides and seed, which may have run before."""
        overrides = (*common, *swept)
        if known := self.trials.get(identity(overrides, seed)):
            return known
        number = len(self.trials)
        values = dict(one.partition("=")[::2] for one in swept)
        parts = [f"{number:03d}", *(f"{key.rpartition('.')[2]}-{value}" for key, value in values.items())]
        if seed_given := [one for one in common if one.startswith("seed=")]:
            parts.append(f"seed-{seed_given[-1].removeprefix('seed=')}")
        folder = "_".join(map(_for_a_path, parts))[:100].rstrip("-")
        trial = Trial(number, overrides, seed, folder, values)
        self.trials[trial.key] = trial
        return trial

    def write(self, trial: Trial) -> None:
        row = {"trial": trial.number, **dataclasses.asdict(trial), "time": f"{datetime.now():%F %T}"}
        del row["number"]
        path = self.folder / FILE
        torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
        with path.open("ab") as file:
            file.write(b"\n" * torn + json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _for_a_path(text: str) -> str:
    """Without what a shell, a file system or Hydra would read as its own."""
    return re.sub(r"[^\w.+-]+", "-", re.sub(r"-?[^\w.+-]+$|(?<=-)[^\w.+-]+", "", text))


def read_trials(folder: Path) -> list[Trial]:
    """Every trial in the ledger of `folder`, as its last row has it, by number; [] where there is none."""
    last: dict[int, Trial] = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for line in (folder / FILE).read_text().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # torn by a kill
                row: dict[str, Any] = json.loads(line)
                row["number"], row["overrides"] = row.pop("trial"), tuple(row["overrides"])
                del row["time"]
                last[row["number"]] = Trial(**row)
    return [last[number] for number in sorted(last)]
