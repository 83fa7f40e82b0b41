"""trials.jsonl, all that a sweep remembers: the state of each trial, a row a change; the last one counts."""

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from trainer.errors import UserError
from trainer.files.untrusted import printable
from trainer.sweep.runs import Run

FILE = "trials.jsonl"
RUNNING, DONE, FAILED, STOPPED, DIED, MISTAKEN = (
    "running",
    "done",
    "failed",  # a loss that was not finite: a restart would end the same
    "stopped",  # and saved
    "died",
    "mistaken",
)
FINAL = {DONE, FAILED}


@dataclass
class Trial:
    """One run of a sweep, identified by all its overrides, in any order, and the seed."""

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
        return _key(self.overrides, self.seed)


def _key(overrides: Sequence[str], seed: int | None) -> tuple[tuple[str, ...], int | None]:
    """The seed counts once, whether the command line or the settings gave it."""
    return tuple(sorted(word for word in overrides if not word.startswith("seed="))), seed


class TrialLog:
    """The trials of a sweep's folder by key; every change is on disk before it takes effect.

    Args:
        common: the overrides of all trials of this command line.
        metric: its values are read again from the runs, because this command may name another metric.
    """

    def __init__(self, folder: Path, common: Sequence[str], metric: str) -> None:
        self.folder, self._common = folder, list(common)
        self.trials = {trial.key: trial for trial in read_trials(folder)}
        for trial in self.trials.values():
            if trial.state == RUNNING:  # when the sweep was killed, which kills its trials
                trial.state = STOPPED
            trial.value = Run(folder / trial.folder).metrics.get(metric)

    def trial(self, swept: Sequence[str], seed: int | None, *, repeated: bool = False) -> Trial:
        """The trial with these overrides and seed, which may have run before.

        `repeated`: the seed is one of several, and so an override of this trial.
        """
        overrides = (*self._common, *([f"seed={seed}"] if repeated else []), *swept)
        if known := self.trials.get(_key(overrides, seed)):
            return known
        values = dict(one.partition("=")[::2] for one in swept)
        parts = [f"{len(self.trials):03d}"]
        parts += [f"{key.rpartition('.')[2]}-{value}" for key, value in values.items()]
        parts += [f"seed-{seed}"] if repeated else []
        folder = "_".join(map(_for_a_path, parts))[:100].rstrip("-")
        trial = Trial(len(self.trials), overrides, seed, folder, values)
        self.trials[trial.key] = trial
        return trial

    def combinations(self, keys: Sequence[str]) -> Iterator[tuple[dict[str, str], list[Trial]]]:
        """The values of `keys` that this command line has tried, in order, each with its trials."""
        found: dict[tuple[str, ...], list[Trial]] = {}
        for trial in self.trials.values():
            swept = [f"{key}={trial.swept.get(key)}" for key in keys]
            if trial.key == _key([*self._common, *swept], trial.seed):
                found.setdefault(tuple(swept), []).append(trial)
        for trials in found.values():
            yield trials[0].swept, trials

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
    """Without characters that are special to a shell, a file system or Hydra."""
    return re.sub(r"[^\w.+-]+", "-", re.sub(r"-?[^\w.+-]+$|(?<=-)[^\w.+-]+", "", text))


def read_trials(folder: Path) -> list[Trial]:
    """Every trial in the trial log of `folder`, from its last row, by number; [] without a log.

    Raises:
        UserError: a row that no sweep writes.
    """
    path, last = folder / FILE, dict[int, Trial]()
    try:
        lines = path.read_text(errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    for at, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:  # torn when the sweep was killed
            continue
        try:
            del row["time"]
            trial = Trial(number=row.pop("trial"), overrides=tuple(row.pop("overrides")), **row)
            last[trial.number] = trial
        except (KeyError, TypeError) as error:
            raise UserError(f"{path}, line {at} is not a trial of a sweep: {printable(error)}") from error
    return [last[number] for number in sorted(last)]


def values_of(trials: Sequence[Trial]) -> list[float]:
    """The metric of those that are done."""
    return [trial.value for trial in trials if trial.state == DONE and trial.value is not None]


def mean(trials: Sequence[Trial]) -> float | None:
    """The mean of the metric; None unless all are done, with a number."""
    values = values_of(trials)
    told = sum(values) / len(trials) if len(values) == len(trials) else math.nan
    return told if math.isfinite(told) else None
