"""Run a training with external or injected failures, and observe their cost in the ranks' heartbeats."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import drilled_run
from benchmarks.faulty_case import INJECTED, STRATEGIES, Case, Failure, Row
from benchmarks.restarts import problems_of_logs
from tests.hosts import Host
from trainer.checkpoint.open_checkpoint import verified
from trainer.errors import UserError
from trainer.failures import processes
from trainer.failures.heartbeat import Records

STEPS, TIMEOUT_S = 140, 8.0
_DEADLINE_S = 200.0  # for one failure and its restart, on a busy machine
_LATE_S = 10.0  # time after timeout_s in which a report must come


@dataclass
class Rank:
    """A process of the run, whose heartbeat can be read after its death."""

    pid: int
    records: Records

    @property
    def step(self) -> int:
        """The last step that this rank has finished."""
        beat = self.records.main()
        return max(beat.finished, beat.step - 1)

    @property
    def is_alive(self) -> bool:
        return processes.state(self.pid) != "dead"


def overrides(case: Case, run_dir: Path) -> list[str]:
    found = [f"train.max_steps={STEPS}", "train.log_every_steps=1", f"distributed.timeout_s={TIMEOUT_S}"]
    found += ["checkpoint.every_steps=null", "checkpoint.every_epochs=null", "train.global_batch_size=60"]
    found += ["train.eval_every_epochs=2"]
    return [*found, "resume=auto", f"run_dir={run_dir}", *STRATEGIES[case.strategy]]


class FaultyRun:
    """A run with failures, observed from outside."""

    def __init__(self, case: Case, start: drilled_run.Start, folder: Path, pair: Sequence[Host] = ()) -> None:
        self.pair, self._is_cut = pair, False
        self.case, self.draw, self.start, self.folder = case, random.Random(case.seed), start, folder
        self.run_dir, self.scratch, self.mark = folder / "run", folder / "tmp", folder / "failure.json"
        self.scratch.mkdir(parents=True)
        self.ranks: list[Rank] = []
        self.pids = set[int]()  # the ranks of all attempts
        self.launchers: list[subprocess.Popen[bytes]] = []
        self.stack = contextlib.ExitStack()
        self.manifests: dict[str, dict[str, Any]] = {}

    def finish(self) -> tuple[str | None, list[Row]]:
        """Return the hash at the end, and a row for each failure."""
        rows = []
        with self.stack:
            self._launch()
            for failure in self.case.failures:
                rows.append(self._cause(failure))
            row = rows[-1] if rows else Row(self.case, "none")
            self._until(lambda: self.has_ended, "the end of the run")
            for _ in range(3):
                if (self.run_dir / "result.json").exists():
                    break
                self._launch()
                self._until(lambda: self.has_ended, "the end of the second launch")
        row.problems += self._problems_at_end()
        with contextlib.suppress(OSError):
            return json.loads((self.run_dir / "result.json").read_text())["param_sha256"], rows
        return None, rows

    @property
    def has_ended(self) -> bool:
        return all(launcher.poll() is not None for launcher in self.launchers)

    def _launch(self) -> None:
        mark = {drilled_run.MARK: f"{os.getpid()}-{self.folder.name}", "TMPDIR": str(self.scratch)}
        environment = {**mark, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        injected = [word for failure in self.case.failures for word in failure.command_line(self.mark)]
        self.launchers = self.start(
            [*overrides(self.case, self.run_dir), *injected], environment, self.folder
        )
        self.stack.enter_context(drilled_run.stopping(self.launchers))

    def _until(self, done: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not done():
            if time.monotonic() > deadline:
                at = [(rank.pid, rank.is_alive, rank.records.main()) for rank in self.ranks]
                raise TimeoutError(f"waited {_DEADLINE_S:.0f} s for {what}; ranks {at}")
            time.sleep(0.003)

    # ---- one failure

    def _cause(self, failure: Failure) -> Row:
        """Cause the failure, and wait until the run has made another step; return the row."""
        row = Row(self.case, failure.kind)
        num_resumes, resumed = self._resumed()
        self._until(lambda: self._have_started() or self.has_ended, "the ranks")
        if self.has_ended:
            row.problems += ["the run ended before the failure"]
            return row
        if failure.kind not in INJECTED:
            self._until(lambda: max(r.step for r in self.ranks) >= failure.step or self.has_ended, "the step")
            time.sleep(self.draw.random() * 0.03)
        else:
            self._until(lambda: self.mark.exists() or self.has_ended, "the injected failure")
        if (self.run_dir / "result.json").exists():
            row.kind += " missed"
            return row
        struck_at, victims = time.time(), self._strike(failure)
        if failure.kind == "slow":
            return row
        old = self.ranks
        self._until(lambda: self._has_continued(old, failure, row, struck_at, victims), "the restart")
        row.next_step_s = time.time() - struck_at
        again, at = self._resumed()
        had = max(*(rank.step for rank in old), resumed if num_resumes else 0)
        row.lost = had - (at if again > num_resumes else 0)
        self._check(row, failure, victims, old)
        return row

    def _strike(self, failure: Failure) -> list[int]:
        """Cause a failure from outside, and return the pids of the affected processes."""
        if failure.kind in INJECTED:
            return []
        if failure.kind == "cut":
            self.pair[1].link_down()
            self._is_cut = True
            return [rank.pid for rank in self.ranks if rank.pid in set(self.pair[1].pids())]
        count = 2 if failure.kind == "pair" else 1
        number = signal.SIGSTOP if failure.kind == "stop" else signal.SIGKILL
        victims = [rank.pid for rank in self.draw.sample(self.ranks, count)]
        for pid in victims:
            os.kill(pid, number)
        return victims

    def _has_continued(
        self, old: list[Rank], failure: Failure, row: Row, struck_at: float, victims: list[int]
    ) -> bool:
        """Return whether a new attempt has made a step, or the run has ended; may cause a second failure."""
        self._note_report(row, struck_at)
        if failure.kind == "saver" and len(victims) == 1:
            for rank in old:
                if rank.pid not in victims and rank.records.main().phase == "save_on_failure":
                    time.sleep(self.draw.random() * 0.08)
                    self._kill(rank.pid)
                    victims.append(rank.pid)
        if self._is_cut and not any(rank.is_alive for rank in old):
            self._is_cut = False
            for host in self.pair:  # their launchers wait for each other
                host.kill_all()
        if self.has_ended:
            if (self.run_dir / "result.json").exists():
                return True
            self._launch()  # torchrun does not restart after a NaN
        if any(rank.is_alive for rank in old) or not self._have_started(old):
            return False
        if failure.kind == "again" and len(victims) == 1:
            time.sleep(self.draw.random() * 1.5)
            self._kill(again := self.draw.choice(self.ranks).pid)
            victims.append(again)
            old += self.ranks
            return False
        steps = [rank.records.main().step for rank in self.ranks]
        return min(steps) > self._resumed()[1] + 1 or all(not rank.is_alive for rank in self.ranks)

    @staticmethod
    def _kill(pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _note_report(self, row: Row, struck_at: float) -> None:
        path = self.run_dir / "failure.json"
        with contextlib.suppress(OSError, ValueError):
            if (written := path.stat().st_mtime) > struck_at - 1 and row.report_s is None:
                row.report, row.report_s = json.loads(path.read_text())["message"], written - struck_at

    def _resumed(self) -> tuple[int, int]:
        """Return how often the run has resumed, and the step of the last resume."""
        with contextlib.suppress(OSError):
            text = (self.run_dir / "train.log").read_text()
            if found := re.findall(r"resumed from .* at step (\d+)", text):
                return len(found), int(found[-1])
        return 0, 0

    def _have_started(self, but: Sequence[Rank] = ()) -> bool:
        """Return whether all ranks of this attempt have started; `but` belong to earlier attempts."""
        known = {rank.pid for rank in but}
        found = [rank for rank in ranks_under(self.launchers) if rank.pid not in known]
        self.pids |= {rank.pid for rank in found}
        if len(found) == self.case.world and any(rank.is_alive for rank in found):
            self.ranks = found
            return True
        return False

    # ---- problems

    def _check(self, row: Row, failure: Failure, victims: list[int], old: list[Rank]) -> None:
        reason = "no step was saved" in row.report or failure.kind == "nan"
        is_only_rank = self.case.world == 1 and failure.kind in ("kill", "update", "exit", "again")
        if row.lost > 1 and not reason and not is_only_rank:
            row.problems.append(f"{row.lost} steps lost without a reason")
        if row.lost < 0:
            row.problems.append("resumed at a step that no rank had finished")
        row.report_problems += [] if is_only_rank else self._report_problems(row, failure, victims)
        if row.report_s is not None and row.report_s > TIMEOUT_S + _LATE_S:
            row.report_problems.append(f"late report, after {row.report_s:.1f} s")
        row.problems += self._bad_checkpoints()

    def _report_problems(self, row: Row, failure: Failure, victims: list[int]) -> list[str]:
        if failure.kind == "cut":
            said = "".join(path.read_text(errors="replace") for path in self.folder.glob("output*"))
            saved = [step for step, _ in set(re.findall(r"step (\d+) was saved by rank (\d+)", said))]
            row.report = next(iter(re.findall(r"host .*was saved by rank .*", said)), row.report)
            found = [f"host {n} is not named" for n in (0, 1) if f"host {n} (" not in said]
            return found + ([f"saved twice: {saved}"] if len(set(saved)) < len(saved) else [])
        if failure.kind == "nan":
            is_named = f"rank {failure.rank} (" in row.report or self.case.world == 1
            return [] if is_named else [f"the report does not name rank {failure.rank}"]
        blamed = re.match(r"rank (\d+) \(host \d+, [^,]*, pid (\d+)\)", row.report)
        if blamed is None:
            return ["no report" if row.report_s is None else "the report names no rank"]
        if int(blamed[2]) not in victims if victims else int(blamed[1]) != failure.rank:
            return [f"the report names rank {blamed[1]}, not {victims or failure.rank}"]
        return []

    def _bad_checkpoints(self) -> list[str]:
        found = []
        for path in sorted((self.run_dir / "checkpoints").glob("step_*")):
            try:
                manifest = verified(path).manifest
            except UserError as error:
                found.append(f"{path.name}: {error}")
                continue
            files = {name: vars(file) for name, file in manifest.files.items() if name.startswith("model-")}
            before = self.manifests.setdefault(path.name, files)
            if files.keys() == before.keys() and files != before:
                found.append(f"{path.name} was saved twice, with different weights")
        return found

    def _problems_at_end(self) -> list[str]:
        found = self._bad_checkpoints()
        if (self.run_dir / "result.json").exists():
            found += problems_of_logs(self.run_dir, STEPS)
        found += [f"process {pid} is left over" for pid in self.pids if processes.state(pid) != "dead"]
        names = [path.name for path in self.scratch.iterdir()]
        found += [
            f"{name} is left over"
            for name in names
            if not name.startswith(("torchelastic_", "torchinductor_"))
        ]
        shared = [path.name for path in Path("/dev/shm").iterdir()]
        found += [f"{name} is left over" for name in shared if any(f"_{pid}_" in name for pid in self.pids)]
        kept = (self.run_dir / "checkpoints").glob("*")
        return found + [f"{p.name} is left over" for p in kept if not re.fullmatch(r"step_\d+", p.name)]


def ranks_under(launchers: Sequence[Any]) -> list[Rank]:
    """Return the descendants of the launchers that have their own heartbeat."""
    found = []
    for pid in [below for launcher in launchers for below in _below(launcher.pid)]:
        with contextlib.suppress(OSError):
            for handle in Path(f"/proc/{pid}/fd").iterdir():
                if "ringmaster-heartbeat" in str(handle.readlink()):
                    with contextlib.suppress(OSError):  # another rank's heartbeat
                        found.append(Rank(pid, Records.of(pid, int(handle.name))))
                        break
    return found


def _below(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from _below(int(child))
