"""How a rank ends a run that failed: the last step is saved, the verdict is printed and written, all exit."""

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import RunEndError, UserError, tell_torchrun
from trainer.faults import exit_report, flight_recorder
from trainer.faults.heartbeat import Heartbeat
from trainer.faults.neighbour import Neighbour, RankIdentity
from trainer.faults.reports import Reports
from trainer.faults.rescue import SAVING_HOSTS, Rescue, left_without, saving_hosts
from trainer.faults.verdict import ASLEEP_S, UNHEARD_S, Observed, Verdict, judge

if TYPE_CHECKING:
    from torch.distributed import Store

ALONE_S = 5.0  # how long the others may take to end after a rank's orderly end, or their launcher's


class Ending:
    """What a `Watch` does at the end of a failed run, and what it needs for that.

    Args:
        here: the ranks of this host that can be observed.
        connect: opens a connection to the store of this attempt; None if there is none.
        timeout_s: how long a rank may keep the others waiting.

    Attributes:
        reports: of the other hosts, once they were asked for.
        rescue: this rank's part in saving.
        run_dir: that of failure.json and stacks/; None before there is one.
        cut: ends all waits of this process for other ranks; None: no rank goes on without others.
        check_shares: raises UserError if a batch cannot be shared among a number of ranks.
        left: the ranks that go on without others, this one among them, once that is decided.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        rank: int,
        members: Sequence[RankIdentity],
        here: dict[int, Neighbour],
        connect: Callable[[], "Store"] | None,
        timeout_s: float,
    ) -> None:
        # Launchers of several hosts may count restarts differently.
        self._attempt = max(member.attempt for member in members)
        self._heartbeat, self._rank, self._members, self._here = heartbeat, rank, members, here
        self._connect, self._timeout_s = connect, timeout_s
        self._own = next(member for member in members if member.rank == rank)
        self.run_dir: Path | None = None
        self.cut: Callable[[], None] | None = None
        self.check_shares: Callable[[int], object] = lambda num_ranks: None
        self.left: tuple[int, ...] = ()
        self._written_to: Path | None = None
        self._refusals = True
        self._parent, self._orphan_since = os.getppid(), 0.0
        self.reports: Reports | None = None
        self.rescue = Rescue(heartbeat, rank, here)

    def writes_to(self, run_dir: Path, refusals: bool = True) -> None:
        """Set the directory of failure.json and stacks/.

        Args:
            refusals: whether to write an orderly end, too.
        """
        self.run_dir, self._refusals = run_dir, refusals

    def reports_of_other_hosts(self) -> Reports | None:
        others = [member for member in self._members if member.rank not in self._here]
        if self.reports is None and others and self._connect is not None:
            first = [
                Observed(member.rank, member.host, member.hostname, member.pid, position=-1)
                for member in others
            ]
            self.reports = Reports(self._connect, self._own.host, first)
        return self.reports

    def send_last_report(self) -> None:
        """Send the other hosts a last report: no rank of this host can report later."""
        if reports := self.reports_of_other_hosts():
            self._heartbeat.tick()  # it may take a moment, in which no neighbour should take over
            reports.close([neighbour.observe() for neighbour in self._here.values()])

    def give(self, verdict: Verdict, everyone: Sequence[Observed]) -> None:
        """Give this host's verdict, unless another's was earlier."""
        culprit = next(rank for rank in everyone if rank.rank == verdict.ranks[0])
        if verdict.kind == "orderly" and culprit.ended_ago_s < ALONE_S:
            return  # all ranks reach such an end by themselves, if they can
        if self.prints_traceback(verdict):
            return
        verdict = replace(verdict, saving_hosts=saving_hosts(everyone, verdict.ranks))
        self.end(self._agreed(self._with_those_left(verdict, everyone)))

    def _with_those_left(self, verdict: Verdict, everyone: Sequence[Observed]) -> Verdict:
        if self.cut is None:
            return verdict
        left = left_without(everyone, verdict, by_host=self._own.error_file is not None)
        try:
            self.check_shares(len(left) or 1)
        except UserError as error:
            return verdict.followed_by(f"the others cannot go on: {error}")
        return replace(verdict, left=left)

    def _agreed(self, verdict: Verdict) -> Verdict:
        """The first verdict that a host has given; if the store does not answer, this one.

        The store's host may be lost then, so the first few others save: one at a time, since the disk has a
        lock, and who comes later finds the step. Behind a cut link both sides may, which does no harm.
        """
        reports = self.reports_of_other_hosts()
        if reports is None and len(self._here) == len(self._members):
            return verdict
        if reports is not None and (agreed := reports.agree(verdict, timeout_s=1.0)) is not None:
            return agreed
        hosts = verdict.saving_hosts if self._own.host <= SAVING_HOSTS else ()
        return replace(verdict, saving_hosts=hosts, left=())

    def prints_traceback(self, verdict: Verdict) -> bool:
        """Whether the verdict is about a rank of this host that is exiting: its traceback comes first."""
        if verdict.kind != "raised" or verdict.ranks[0] not in self._here:
            return False
        culprit = self._here[verdict.ranks[0]].observe()
        return culprit.state != "dead" and (culprit.ended_s or 0.0) < ALONE_S

    def end(self, verdict: Verdict) -> None:
        """Save, print the verdict, write it, and exit; kill the ranks of this host that cannot exit."""
        if verdict.kind != "orderly":
            verdict = self._with_save(verdict)
        if verdict.left and len(self._here) == len(self._members):  # another may have died during the save
            for neighbour in self._here.values():
                neighbour.look_for_death()
            now = [neighbour.observe() for neighbour in self._here.values()]
            verdict = self._with_those_left(replace(verdict, left=()), now)
        if verdict.left and self.rescue.is_saved:
            self._let_go_on(verdict)
            return
        writing = threading.Thread(target=self._write, args=(verdict,), daemon=True)
        writing.start()
        writing.join(timeout=1.0)  # the disk may hang on the host that is lost
        exit_report.say(verdict, len(self._members), self._written_to)
        culprits = (self._members[rank].error_file for rank in verdict.ranks if rank in self._here)
        for file in (*culprits, self._own.error_file):
            if file is not None and verdict.kind != "orderly":
                tell_torchrun(verdict.message, file)
        if verdict.kind in ("raised", "died") and verdict.ranks[0] in self._here:
            exit_report.let_torchrun_look()
        self.send_last_report()
        self._heartbeat.note({"verdict": verdict.status, "status": verdict.status})
        self._kill_stuck(verdict)
        exit_report.leave(verdict.status)

    def _kill_stuck(self, verdict: Verdict) -> None:
        others = (neighbour for rank, neighbour in self._here.items() if rank != self._rank)
        for neighbour in others:
            stuck = neighbour.member.rank in verdict.ranks and verdict.kind in ("stopped", "hangs")
            if neighbour.died_at_ns is None and (stuck or neighbour.observe().asleep_s > ASLEEP_S):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(neighbour.member.pid, signal.SIGKILL)

    def _let_go_on(self, verdict: Verdict) -> None:
        """Have those ranks of this host that are left go on, and end the others."""
        shown = ", ".join(map(str, verdict.left))
        verdict = verdict.followed_by(f"without a restart, these go on: rank {shown}")
        taken = {rank: text for rank, each in self._here.items() if (text := each.stacks.read())}
        keeping = (verdict, self.run_dir, taken)
        writing = threading.Thread(target=exit_report.keep, args=keeping, daemon=True)
        writing.start()
        writing.join(timeout=1.0)
        exit_report.print_line(f"\n{verdict.message}")
        self._kill_stuck(verdict)
        self.rescue.tell(left=verdict.left)
        self.go_on(verdict.left)

    def go_on(self, left: Sequence[int]) -> None:
        """Go on with the ranks that are `left`, or exit if this is none of them."""
        if self._rank not in left:  # not by an exit, after which launch=local would end the others, too
            os.kill(os.getpid(), signal.SIGKILL)
        deadline = time.monotonic() + ALONE_S
        for neighbour in [each for rank, each in self._here.items() if rank not in left]:
            while neighbour.died_at_ns is None and time.monotonic() < deadline:
                neighbour.look_for_death()  # rank 0 has the lock of run_dir
                self._wait(0.01)
        self.left = tuple(left)
        if self.rescue.last_step is not None:
            self.rescue.last_step.thaw()
        assert self.cut is not None
        self.cut()

    def _with_save(self, verdict: Verdict) -> Verdict:
        if (reports := self.reports_of_other_hosts()) is not None:
            reports.tell([neighbour.observe() for neighbour in self._here.values()], eager=True)
        return verdict.followed_by(self.rescue.lead(verdict, self._wait, self._is_at_work))

    def _wait(self, seconds: float) -> None:
        self._heartbeat.tick()
        time.sleep(seconds)

    def _is_at_work(self, host: int) -> bool:
        """Whether `host`, another than this, has neither ended nor fallen silent."""
        reports = self.reports_of_other_hosts()
        if reports is None or host in reports.ended:
            return False
        return any(each.host == host and each.heard_s < UNHEARD_S for each in reports.others())

    def leave(self, status: int) -> None:
        """Exit, as the verdict of a neighbour says; what this rank alone knows is written before."""
        writing = threading.Thread(target=flight_recorder.write, args=(self.run_dir, self._rank), daemon=True)
        writing.start()
        writing.join(timeout=1.0)
        exit_report.leave(status)

    def _write(self, verdict: Verdict) -> None:
        self._record(verdict)
        taken = {rank: neighbour.stacks.read() for rank, neighbour in self._here.items()}
        exit_report.keep(verdict, self._written_to, {rank: text for rank, text in taken.items() if text})
        flight_recorder.write(self._written_to, self._rank)

    def _record(self, verdict: Verdict) -> None:
        """Write the verdict, if it is to be written, and if the disk takes it."""
        run_dir = self.run_dir if self._refusals or verdict.kind != "orderly" else None
        facts = {"status": verdict.status, **verdict.facts, "message": verdict.message, "kind": verdict.kind}
        if run_dir is not None and exit_report.write_failure(run_dir, facts | {"attempt": self._attempt}):
            self._written_to = run_dir

    def leave_when_orphaned(self) -> None:
        """Exit if the launcher died and the stop that the kernel requested takes too long."""
        if os.getppid() == self._parent:
            return
        now = time.monotonic()
        self._orphan_since = self._orphan_since or now
        if now - self._orphan_since > ALONE_S - 1:
            own = self._here[self._rank].observe()
            words = "the launcher of this host died, and there was no time to save"
            verdict = exit_report.of_one(own, 1, words)
            self._record(verdict)
            self._heartbeat.note({"verdict": 1, "status": 1})  # or neighbours take this for a death
            exit_report.leave(1)

    def record_orderly(self, error: RunEndError) -> None:
        """Write an end that all ranks reach at the same place, unless another rank has."""
        if self._rank == 0 or self.run_dir is None or exit_report.read_failure(self.run_dir) is None:
            about = self._members[error.ranks[0] if error.ranks else self._rank]
            own = self._here[self._rank].observe()
            own = replace(own, rank=about.rank, host=about.host, hostname=about.hostname, pid=about.pid)
            self._record(exit_report.of_one(own, error.exit_code, str(error)))

    def print_at_exit(self) -> None:
        """Print the verdict after the traceback: no other rank of this host is left to do so."""
        own = replace(self._here[self._rank].observe(), symptom=False)
        verdict = judge([own], self._timeout_s, pressing=False)
        if verdict is None:
            return
        reports = self.reports_of_other_hosts()
        elsewhere = saving_hosts(reports.others(), ()) if reports is not None else ()
        verdict = replace(verdict, saving_hosts=(*elsewhere, self._own.host)[:SAVING_HOSTS])
        verdict = self._with_save(self._agreed(verdict))
        self._write(verdict)
        if len(self._members) > 1 or own.worker:
            atexit.register(exit_report.say, verdict, len(self._members), self._written_to)
        elif self._heartbeat.finished:
            atexit.register(exit_report.print_line, verdict.message.rpartition("; ")[2])
