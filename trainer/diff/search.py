"""Search for the first thing that differs between two runs, and report what was compared on the way."""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

from trainer.checkpoint.manifest import read_manifest
from trainer.diff.compare_traces import Difference, Entry, differences, read_traces
from trainer.diff.recorded import RecordedRun, code_rows, divergence, environment_rows, setting_rows
from trainer.errors import UserError, first_few
from trainer.files.columns import columns
from trainer.launch import new_process
from trainer.replay.replayed import checkpoint_before
from trainer.run_dir.console import table

_MOST_REPLAYS = 12  # of each run
_SHOWN = 5  # entries that differ
_WORDS = {
    "before": "weights and state before the step",
    "outputs": "outputs of modules",
    "backward": "gradients of outputs",
}
_WORDS |= {"gradients": "gradients of parameters", "optimizer": "optimizer settings", "update": "update"}


@dataclass(frozen=True)
class Replay:
    """The traced steps of one run."""

    facts: Mapping[str, Any]  # replay.json, see trainer.diff.trace
    traces: Mapping[int, Sequence[Entry]]

    def words(self) -> str:
        """Describe where the replay started, and whether its numbers equal those that the run recorded."""
        facts, hashes = self.facts, self.facts["hashes"]
        words = f"from {Path(facts['start']).name if facts['start'] else 'the initial weights'}"
        words = f"steps {min(map(int, hashes)) + 1} to {max(map(int, hashes)) + 1}, {words}: "
        if not facts["mismatches"]:
            return words + ("as recorded" if facts["recorded"] else "no record")
        why = "; ".join(facts["reasons"]) or "no change of imported code, torch or hardware was found"
        return f"{words}NOT as recorded: {facts['mismatches'][0]} ({why})"


class _Report:
    """Prints each part of the report when it is known, or one JSON object at the end."""

    def __init__(self, as_json: bool) -> None:
        self._as_json, self._facts = as_json, dict[str, Any]()

    def add(self, name: str, words: str, value: Any, rows: Sequence[Sequence[str]] = ()) -> None:
        """Add a part: `words`, a line; `rows` to print below it; and `value`, for JSON."""
        self._facts[name] = value
        if not self._as_json:
            print(table({f"{name:<11}": words}))
            if rows:
                print("\n".join(f"  {line}" for line in columns(rows).splitlines()))
            sys.stdout.flush()

    def close(self, status: int) -> int:
        if self._as_json:
            print(json.dumps(self._facts, indent=1))
        return status


def diff(runs: Sequence[RecordedRun], step: int | None, tolerance: float, as_json: bool) -> int:
    """Compare two runs, print the report, and return the exit status.

    Args:
        step: the step to replay; None: the first one that differs.
        tolerance: largest difference of numbers that count as equal, in ulp.

    Raises:
        UserError: a replay failed, or a run lacks what is needed for it.
    """
    one, other = runs
    report = _Report(as_json)
    rows, apart = setting_rows(one, other)
    _add_rows(report, "settings", rows, f" (and {first_few(apart)}, without effect on a step)" * bool(apart))
    found = divergence(one, other, tolerance) if step is None else None
    attempts = [run.attempt(step or (found and found.step) or max(run.steps, default=1)) for run in runs]
    _add_rows(report, "environment", environment_rows(*attempts))
    _add_rows(report, "code", code_rows(*attempts))
    if found is not None:
        if found.step is None:
            words = f"equal in all {found.equal:,} steps that both have recorded"
            report.add("records", words, {"first": None, "equal": found.equal})
            return report.close(0)
        before = f"; equal up to step {found.equal}" if found.equal else ""
        report.add("records", f"first difference: {found.words}{before}", vars(found))
    with tempfile.TemporaryDirectory(prefix="trainer-diff-") as folder:
        search = _Search(runs, tolerance, Path(folder))
        if found is None:
            assert step is not None
            search.replay([step])
        else:
            assert found.step is not None
            search.find(found.step)
        return report.close(_add_result(report, search))


def _add_rows(report: _Report, name: str, rows: Sequence[Sequence[str]], more: str = "") -> None:
    words = f"{len(rows)} differ{'s' * (len(rows) == 1)}" if rows else "equal"
    report.add(name, words + more, rows, [["", "A", "B"], *rows] if rows else [])


class _Search:
    """Replays both runs to find the first step with a difference.

    Attributes:
        step: the first traced step with a difference; without a difference, the last traced step.
        found: the differences in `step`, in the order of computation.
        counts: the number of entries compared in `step`, by kind.
    """

    def __init__(self, runs: Sequence[RecordedRun], tolerance: float, folder: Path) -> None:
        self._runs, self._tolerance, self._folder = runs, tolerance, folder
        self._number = 0
        self.step, self.found, self.counts = 0, list[Difference](), dict[str, int]()
        self.replays: list[Replay] = []

    def find(self, step: int) -> None:
        """Search backward from `step`, in which a number differs."""
        low, high = 1, step
        steps = list(range(max(1, step - 1), step + 1))  # the update of the step before may be the cause
        for _ in range(_MOST_REPLAYS):
            self.replay(steps)
            if not self.found:
                low = steps[-1] + 1
            elif self.step == 1 or self.found[0].kind != "before":
                return
            elif (made := self._first_state()) is not None:
                low = high = max(1, made)
            else:
                high = self.step - 1
            if low > high:
                return
            steps = [(low + high) // 2]

    def replay(self, steps: Sequence[int]) -> None:
        """Trace `steps` in both runs, except those before the newest checkpoint, and compare them."""
        self.replays = [self._replay(run, steps) for run in self._runs]
        one, other = self.replays
        for step in sorted(one.traces.keys() & other.traces.keys()):
            self.step = step
            self.found, self.counts = differences(one.traces[step], other.traces[step], self._tolerance)
            if self.found:
                break

    def _first_state(self) -> int | None:
        """Return after which step the state first differs; None if hashes can't be compared."""
        one, other = (replay.facts["hashes"] for replay in self.replays)
        common = sorted(one.keys() & other.keys(), key=int)
        if self._tolerance or any(len(one[made]) != len(other[made]) for made in common):
            return None
        return next((int(made) for made in common if one[made] != other[made]), None)

    def _replay(self, run: RecordedRun, steps: Sequence[int]) -> Replay:
        self._number += 1
        out = self._folder / str(self._number)
        out.mkdir()
        checkpoint = checkpoint_before(run.folder, steps[-1])
        first = read_manifest(checkpoint).step + 1 if checkpoint else 1
        attempt = run.attempt(steps[-1])
        is_exact = run.settings.get("train.exact", "null") != "null"
        processes = 1 if is_exact else attempt.world_size
        argv = [
            str(run.folder),
            *(["launch=local", f"launch.processes={processes}"] if processes > 1 else []),
        ]
        argv += ["--first", str(first), "--out", str(out), "--steps", *map(str, steps)]
        argv += ["--from", str(checkpoint)] if checkpoint else []
        print(f"replaying {run.folder.name}, steps {first} to {steps[-1]} ...", file=sys.stderr, flush=True)
        process = new_process.start(
            argv,
            module="trainer.diff.trace",
            python=run.python,
            environment={new_process.PATH: str(run.code)},
            cwd=run.code,
            stdout=DEVNULL,
            stderr=PIPE,
            text=True,
        )
        _, errors = process.communicate()
        if process.returncode:
            raise UserError(
                f"the replay of {run.folder} with the code in {run.code} failed (see --folders):\n"
                f"{errors.strip()}"
            )
        return Replay(json.loads((out / "replay.json").read_bytes()), read_traces(out))


def _add_result(report: _Report, search: _Search) -> int:
    """Add the replays, the compared entries and the first difference; return the exit status."""
    for name, replay in zip("AB", search.replays, strict=True):
        report.add(f"replay {name}", replay.words(), dict(replay.facts))
    differing = Counter(each.kind for each in search.found)
    rows = [
        [_WORDS.get(kind, kind), f"{differing[kind]} of {total} differ" if kind in differing else "equal"]
        for kind, total in search.counts.items()
        if total or kind in differing
    ]
    report.add("compared", f"step {search.step}", {"step": search.step, "entries": search.counts}, rows)
    if not search.found:
        report.add("first", "no difference in the replayed steps", None)
        return int(any(replay.facts["mismatches"] for replay in search.replays))
    first, *others = search.found
    report.add(
        "first",
        f"step {search.step}, {first.name}: {first.words}",
        {"step": search.step, **first._asdict()},
        [[each.name, each.words] for each in others[: _SHOWN - 1]],
    )
    return 1
