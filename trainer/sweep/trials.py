"""The trials of a sweep: trials.jsonl, its only record, and the files of each run."""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import UserError
from trainer.files.untrusted import load_json
from trainer.files.writing import atomic_file
from trainer.run_dir.metrics_file import read_metrics

FILE = "trials.jsonl"
RUNNING, DONE, DIED = "running", "done", "died"
FAILED = "failed"  # the loss was NaN or Inf: a restart would end in the same way
STOPPED = "stopped"  # by a signal, after a save
INVALID = "invalid"  # the run refused a wrong setting
PRUNED = "pruned"  # stopped, because others were better after the same number of evaluations
FINAL = {DONE, FAILED, INVALID, PRUNED}

# A value for each swept setting; None if the setting does not exist with the combination's other choices.
Combination = Mapping[str, str | None]


def words_of(combination: Combination) -> list[str]:
    """Return the overrides of a combination, as on a command line."""
    return [f"{key}={value}" for key, value in combination.items() if value is not None]


class RunFiles:
    """The files of a run. While it is running, `result` is empty, and `scalars` end at the last log step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.result = load_json(folder / "result.json")
        except (OSError, UserError):
            self.result = {}
        self.scalars = read_metrics(folder)

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers in result.json, and the last values in metrics.jsonl, of which any may be NaN."""
        last = {name: values[max(values)] for name, values in self.scalars.items()}
        numbers = {name: value for name, value in self.result.items() if type(value) in (int, float)}
        return last | numbers


@dataclass
class Trial:
    """One run of a sweep, identified by all its overrides, in any order."""

    number: int
    common: Sequence[str]
    swept: Combination
    folder: str
    state: str = STOPPED
    status: int | None = None
    value: float | None = None
    seconds: float = 0.0  # over all attempts
    reason: str | None = None  # why it is invalid, has failed or died
    pruned_at: int | None = None  # the step of the evaluation after which it was pruned

    @property
    def overrides(self) -> list[str]:
        return [*self.common, *words_of(self.swept)]


class TrialLog:
    """All trials in a sweep's folder, by overrides; those of this command share the overrides `common`."""

    def __init__(self, folder: Path, common: Sequence[str], metric: str) -> None:
        self.folder, self._common, self._metric = folder, common, metric
        self.trials = {_key(trial.overrides): trial for trial in read_trials(folder)}
        self._works = any(trial.state in (DONE, FAILED, PRUNED) for trial in self.comparable())
        for trial in self.trials.values():
            if trial.state == RUNNING:  # the sweep was killed, which kills its trials
                trial.state = STOPPED if trial.pruned_at is None else PRUNED
            trial.value = RunFiles(folder / trial.folder).metrics.get(metric)

    def trial(self, swept: Combination) -> Trial:
        """Return the trial with the values `swept`: that in the log, or else a new trial."""
        if known := self.trials.get(_key([*self._common, *words_of(swept)])):
            return known
        given = {key: value for key, value in swept.items() if value is not None}
        parts = [f"{key.rpartition('.')[2]}-{value}" for key, value in given.items()]
        parts = [re.sub(r"\d+\.\d{6,}(e-?\d+)?", lambda n: f"{float(n[0]):.4g}", part) for part in parts]
        folder = "_".join(map(_for_a_path, [f"{len(self.trials):03d}", *parts]))[:100].rstrip("-")
        trial = Trial(len(self.trials), self._common, swept, folder)
        self.trials[_key(trial.overrides)] = trial
        return trial

    def is_final(self, trial: Trial) -> bool:
        """Return whether `trial` has ended and its folder still exists, so that it is not run again.

        An invalid trial is run again if no trial has worked so far, because all trials may have failed for
        one reason, such as a missing file, that no longer exists.
        """
        if trial.state == INVALID and not self._works:
            return False
        return trial.state in FINAL and (self.folder / trial.folder).is_dir()

    def comparable(self) -> list[Trial]:
        """Return the trials with the common overrides of this command line, in order."""
        return [trial for trial in self.trials.values() if _key(trial.common) == _key(self._common)]

    def combinations(self, keys: Iterable[str]) -> list[list[Trial]]:
        """Return the comparable trials that set `keys`, grouped by all their values except the seed."""
        found: dict[tuple[str | None, ...], list[Trial]] = {}
        for trial in self.comparable():
            if trial.swept.keys() - {"seed"} == {*keys} - {"seed"}:
                found.setdefault(tuple(trial.swept.get(key, "") for key in keys), []).append(trial)
        return list(found.values())

    def evaluations(self, trial: Trial) -> dict[int, float]:
        """Return the metric of a trial by step; the trial may still be running."""
        return RunFiles(self.folder / trial.folder).scalars.get(self._metric, {})

    def write(self) -> None:
        """Replace the file. Call this after every change of a trial, before it takes effect."""
        with atomic_file(self.folder / FILE, on_disk=True) as file:
            for trial in self.trials.values():
                row = dataclasses.asdict(trial)
                if not math.isfinite(trial.value or 0):  # JSON has no NaN
                    row["value"] = None
                file.write(json.dumps(row).encode() + b"\n")


def _key(overrides: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(overrides))


def _for_a_path(text: str) -> str:
    """Remove the characters that are special to a shell, a file system or Hydra."""
    return re.sub(r"[^\w.+-]+", "-", re.sub(r"-?[^\w.+-]+$|(?<=-)[^\w.+-]+", "", text))


def read_trials(folder: Path) -> list[Trial]:
    """Return the trials in the log of the sweep in `folder`; [] if it has none."""
    try:
        rows = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [Trial(**row) for row in rows]


def values_of(trials: Iterable[Trial]) -> list[float]:
    """Return the metric of each trial that is done, if it is a finite number."""
    values = [trial.value for trial in trials if trial.state == DONE and trial.value is not None]
    return [value for value in values if math.isfinite(value)]
