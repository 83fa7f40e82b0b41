"""trials.jsonl: the state of each trial, a row at each change; the last row counts."""

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from trainer.files.untrusted import Fields

FILE = "trials.jsonl"
RUNNING, DONE, FAILED, PRUNED, STOPPED, DIED, MISTAKEN = STATES = (
    "running",  # or the sweep was killed
    "done",
    "failed",  # a loss that was not finite: a restart would end the same
    "pruned",
    "stopped",  # and saved
    "died",
    "mistaken",
)
FINAL = {DONE, FAILED, PRUNED}
_FOLDER = re.compile(r"[0-9]{3,}[\w.+-]*")  # as TrialLog.trial makes it: beside the trial log, nowhere else


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
        return identity(self.overrides, self.seed)


def identity(overrides: Sequence[str], seed: int | None) -> tuple[tuple[str, ...], int | None]:
    """The seed counts once, whether the command line or the settings gave it."""
    return tuple(sorted(word for word in overrides if not word.startswith("seed="))), seed


class TrialLog:
    """The trials of a sweep's folder by key; every change is on disk before it takes effect."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trials = {trial.key: trial for trial in read_trials(folder)}

    def trial(self, common: Sequence[str], swept: Sequence[str], seed: int | None) -> Trial:
        """The trial with these overrides and seed, which may have run before."""
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
        except (ValueError, RecursionError):  # torn when the sweep was killed
            continue
        trial = _trial(Fields(f"{path}, line {at}", row))
        last[trial.number] = trial
    return [last[number] for number in sorted(last)]


def _trial(row: Fields) -> Trial:
    swept = row.mapping("swept")
    trial = Trial(
        number=row.count("trial"),
        overrides=tuple(row.sequence("overrides", of=str)),
        seed=row.integer("seed") if row.has("seed") else None,
        folder=row.text("folder"),
        swept={key: swept.text(key) for key in swept.values},
        state=row.text("state"),
        status=row.integer("status") if row.has("status") else None,
        value=row.number("value") if row.has("value") else None,
        seconds=row.number("seconds"),
    )
    if not _FOLDER.fullmatch(trial.folder):
        row.refuse("folder", "a name such as 000_lr-0.1")
    if trial.state not in STATES:
        row.refuse("state", f"one of {', '.join(STATES)}")
    return trial
