"""The metrics and the branch of each evaluation of a run, in evaluations.jsonl.

Each start of a run creates a new branch, which begins at the state from which the run resumed. Two branches
may reach the same step with different weights, for instance after a resume from an older checkpoint with
another learning rate. Therefore a state is identified by its branch and step, here and in the manifest of a
checkpoint, and only evaluations of the current state's ancestors count when the best state is chosen.
"""

import contextlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.errors import UserError
from trainer.files.address import Location
from trainer.files.untrusted import read_json
from trainer.files.writing import atomic_file

if TYPE_CHECKING:  # trainer.status must not load Hydra, which takes half a second
    from trainer.config import KeepBest

FILE = "evaluations.jsonl"


class State(NamedTuple):
    """The state of a run after a step."""

    branch: str
    step: int


class Evaluations:
    """The evaluations of a run, the same on every rank; only rank 0 writes them to disk."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE
        # Replaced, never mutated, because other threads read them.
        self._origins: Mapping[str, State] = {}  # what each branch resumed from
        self._metrics: Mapping[State, Mapping[str, float]] = {}

    @staticmethod
    def read(run_dir: Location) -> "Evaluations":
        """Return the evaluations of the run in `run_dir`, a directory or an `Address`; may be empty."""
        evaluations = Evaluations(Path())
        origins, metrics = {}, {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), (run_dir / FILE).open("rb") as file:
            try:
                rows = [read_json(run_dir / FILE, line) for line in file.read().splitlines()]
            except UserError as error:
                raise UserError(f"{error}; delete the file to continue without evaluations") from error
            for row in rows:
                if "metrics" in row:
                    metrics[State(row["branch"], row["step"])] = row["metrics"]
                else:
                    origins[row["branch"]] = State(*row["resumed_from"])
        evaluations._origins, evaluations._metrics = origins, metrics
        return evaluations

    def merge(self, other: "Evaluations") -> None:
        """Add the evaluations in `other` without writing them to disk."""
        self._origins = {**self._origins, **other._origins}
        self._metrics = {**self._metrics, **other._metrics}

    def start_branch(self, branch: str, origin: State) -> None:
        """Record that `branch` resumes from `origin`; call `write` before the branch's first checkpoint."""
        self._origins = {**self._origins, branch: origin}

    def add(self, state: State, metrics: Mapping[str, float]) -> None:
        """Add the metrics of an evaluation; call `write` before training continues."""
        self._metrics = {**self._metrics, self.owner(state): dict(metrics)}

    def owner(self, state: State) -> State:
        """Return `state` with the branch that reached it first; a branch includes all states before it."""
        branch, step = state
        while (origin := self._origins.get(branch)) is not None and step <= origin.step:
            branch = origin.branch
        return State(branch, step)

    @property
    def last(self) -> State | None:
        """The state of the newest evaluation; None if there is none."""
        return next(reversed([*self._metrics]), None)

    def of(self, state: State) -> Mapping[str, float]:
        """Return the metrics of `state`; {} if there was no evaluation of it."""
        return self._metrics.get(self.owner(state), {})

    def best(self, current: State, best: "KeepBest", among: Iterable[State] | None = None) -> State | None:
        """Return the state with the best finite metric, the earliest in a tie; None if there is none.

        Args:
            current: only this state and its ancestors count.
            among: only these states count; None for all evaluated states.
        """
        scores: dict[State, float] = {}
        for state in sorted(self._metrics if among is None else among, key=lambda state: state.step):
            is_ancestor = self.owner(State(current.branch, state.step)) == self.owner(state)
            score = self.of(state).get(best.metric, math.nan)
            if state.step <= current.step and is_ancestor and math.isfinite(score):
                scores[state] = score
        return (max if best.mode == "max" else min)(scores, key=scores.__getitem__, default=None)

    def write(self) -> None:
        """Replace the file on disk with these evaluations, and fsync it. Raises OSError."""
        rows: list[Any] = [{"branch": own, "resumed_from": origin} for own, origin in self._origins.items()]
        for (branch, step), metrics in self._metrics.items():
            rows.append({"step": step, "branch": branch, "metrics": metrics})
        with atomic_file(self._path, on_disk=True) as file:
            file.writelines(json.dumps(row).encode() + b"\n" for row in rows)
