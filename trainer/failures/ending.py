"""How a rank ends a run that failed: the last step is saved, the failure is printed and written, all exit."""

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed import Store

from trainer.errors import RetryableError, RunEndError, UserError, report_to_torchrun
from trainer.failures import exit_report
from trainer.failures.diagnosis import ASLEEP_S, Failure, Observed, diagnose
from trainer.failures.heartbeat import Heartbeat
from trainer.failures.host_reports import HostReports
from trainer.failures.neighbour import Neighbour, RankIdentity
from trainer.failures.save_on_failure import SaveOnFailure, find_survivors, saving_host
from trainer.files import failure_file

_DEAD_S = 5.0  # for the ranks of this host that do not go on to be dead
ALONE_S = 5.0  # how long the others may take to end after a rank's orderly end, or their launcher's


class Ending:
    """What a `Watch` does at the end of a failed run, and what it needs for that.

    Args:
        members: all ranks, in order.
        here: the ranks of this host that can be observed.
        connect: opens a connection to the store of this attempt.
        timeout_s: how long a rank may keep the others waiting.

    Attributes:
        reports: of this host and of the others.
        save: this rank's part in saving at a fault.
        survivors: the ranks that go on without the others, this one among them, once that is decided.
        run_dir: that of failure.json and stacks/; None before there is one.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        rank: int,
        members: Sequence[RankIdentity],
        here: dict[int, Neighbour],
        connect: Callable[[], Store],
        timeout_s: float,
    ) -> None:
        # Launchers of several hosts may count restarts differently.
        self._attempt = max(member.attempt for member in members)
        self._heartbeat, self._rank, self._members, self._here = heartbeat, rank, members, here
        self._own, self._timeout_s = members[rank], timeout_s
        self.run_dir: Path | None = None
        self._written_to: Path | None = None
        self._refusals = True
        self._parent, self._orphan_since = os.getppid(), 0.0
        others = [member for member in members if member.rank not in here]
        first = [Observed(each.rank, each.host, each.hostname, each.pid, position=-1) for each in others]
        self.reports = HostReports(connect, self._own.host, first)
        self.save = SaveOnFailure(heartbeat, rank, here)
        self.survivors: tuple[int, ...] = ()
        self._cut: Callable[[], None] | None = None
        self._check_shares: Callable[[int], object] = lambda num_ranks: None

    def writes_to(self, run_dir: Path, refusals: bool = True) -> None:
        """Set the directory of failure.json and stacks/.

        Args:
            refusals: whether to write an orderly end, too.
        """
        self.run_dir, self._refusals = run_dir, refusals

    def let_shrink(self, cut: Callable[[], None], check_batch_sizes: Callable[[int], object]) -> None:
        """Let ranks go on without others (distributed.shrink); without this call, none does.

        Args:
            cut: ends all waits of this process for other ranks.
            check_batch_sizes: raises UserError if a batch can't be divided among a number of ranks.
        """
        self._cut, self._check_shares = cut, check_batch_sizes

    def send_last_report(self) -> None:
        """Send the other hosts a last report: no rank of this host can report later."""
        self._heartbeat.tick()  # it may take a moment, in which no neighbour should take over
        self.reports.close(self._observe())

    def _observe(self) -> list[Observed]:
        return [neighbour.observe() for neighbour in self._here.values()]

    def give(self, failure: Failure, everyone: Sequence[Observed]) -> None:
        """Give this host's failure, unless another's was earlier."""
        culprit = next(rank for rank in everyone if rank.rank == failure.ranks[0])
        if failure.kind == "orderly" and culprit.ended_ago_s < ALONE_S:
            return  # all ranks reach such an end by themselves, if they can
        if self.prints_traceback(failure):
            return
        failure = replace(failure, saving_host=saving_host(everyone, failure.ranks))
        self.end(self._agreed(self._with_survivors(failure, everyone)))

    def _agreed(self, failure: Failure) -> Failure:
        """The first failure that a host has given; if the store does not answer, this one.

        The store's host may be lost then, so the next one saves. Behind a cut link both sides may, which does
        no harm: the disk has a lock, and who comes later finds the step.
        """
        if (agreed := self.reports.agree(failure, timeout_s=1.0)) is not None:
            return agreed
        host = self._own.host if self._own.host <= 1 else None
        return replace(failure, saving_host=host, survivors=())

    def prints_traceback(self, failure: Failure) -> bool:
        """Whether the failure is about a rank of this host that is exiting: its traceback comes first."""
        if failure.kind != "raised" or failure.ranks[0] not in self._here:
            return False
        culprit = self._here[failure.ranks[0]].observe()
        return culprit.state != "dead" and (culprit.ended_s or 0.0) < ALONE_S

    def end(self, failure: Failure) -> None:
        """Save, print the failure, write it, and exit; kill the ranks of this host that cannot exit."""
        began = time.time()
        if failure.kind != "orderly" or failure.status == RetryableError.exit_code:
            failure = self._with_save(failure)
        if failure.survivors and len(self._here) == len(self._members):
            for neighbour in self._here.values():
                neighbour.look_for_death()  # another may have died during the save
            failure = self._with_survivors(failure, self._observe())
        if failure.survivors and self.save.is_saved:
            self._let_survivors_continue(failure)
            return
        _briefly(self._write, failure)
        exit_report.say(failure, len(self._members), self._written_to)
        self._tell_torchrun(failure, began)
        self.send_last_report()
        self._heartbeat.note(failure=failure.status, status=failure.status)
        self._kill_stuck(failure)
        exit_report.leave(failure.status)

    def _tell_torchrun(self, failure: Failure, began: float) -> None:
        """Have torchrun, which may see any rank's end here first, show the earliest: the culprit's."""
        for rank in self._here:
            after_s = -1 if rank in failure.ranks else 3 * (failure.kind == "raised")
            if (file := self._members[rank].error_file) is not None:
                report_to_torchrun(failure.message, file, at=began + after_s)
        if failure.kind == "orderly" and failure.ranks[0] not in self._here:
            failure_file.report_to_launcher(failure.status, failure.message)

    def _kill_stuck(self, failure: Failure) -> None:
        for neighbour in [each for rank, each in self._here.items() if rank != self._rank]:
            stuck = neighbour.member.rank in failure.ranks and failure.kind in ("stopped", "hangs")
            if neighbour.died_at_ns is None and (stuck or neighbour.observe().asleep_s > ASLEEP_S):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(neighbour.member.pid, signal.SIGKILL)

    def _let_survivors_continue(self, failure: Failure) -> None:
        """Have those ranks of this host go on that are to, and end the others."""
        shown = ", ".join(map(str, failure.survivors))
        failure = failure.followed_by(f"without a restart, these go on: rank {shown}")
        _briefly(self._write, failure, False)
        exit_report.print_line(f"\n{failure.message}")
        self._kill_stuck(failure)
        self._heartbeat.note(survivors=failure.survivors)
        self.continue_with(failure.survivors)

    def _with_survivors(self, failure: Failure, everyone: Sequence[Observed]) -> Failure:
        """The failure with the ranks that go on, or with a reason why none does."""
        if self._cut is None:
            return failure
        # torchrun ends its other ranks on a host when one dies.
        ranks = find_survivors(everyone, failure, by_host=self._own.error_file is not None)
        try:
            self._check_shares(len(ranks) or 1)
        except UserError as error:
            return replace(failure, survivors=()).followed_by(f"the others cannot go on: {error}")
        return replace(failure, survivors=ranks)

    def continue_with(self, ranks: Sequence[int]) -> None:
        """Go on with `ranks`, or exit if this is none of them."""
        if self._rank not in ranks:  # not by an exit, after which launch=local would end the others, too
            os.kill(os.getpid(), signal.SIGKILL)
        deadline = time.monotonic() + _DEAD_S
        for neighbour in [each for rank, each in self._here.items() if rank not in ranks]:
            while not neighbour.look_for_death() and time.monotonic() < deadline:
                self.wait(0.01)  # rank 0 has the lock of run_dir
        self.survivors = tuple(ranks)
        if self.save.last_step is not None:
            self.save.last_step.thaw()
        assert self._cut is not None
        self._cut()

    def _with_save(self, failure: Failure) -> Failure:
        self.reports.tell(self._observe(), eager=True)
        return failure.followed_by(self.save.lead(failure, self.wait))

    def wait(self, seconds: float) -> None:
        """Wait, and keep this rank awake in the eyes of the others."""
        self._heartbeat.tick()
        time.sleep(seconds)

    def leave(self, status: int) -> None:
        """Exit, as the failure of a neighbour says; what this rank alone knows is written before."""
        _briefly(exit_report.keep_collectives, self.run_dir, self._rank)
        exit_report.leave(status)

    def _write(self, failure: Failure, ends: bool = True) -> None:
        """Write what is known; failure.json only if the run `ends`."""
        if ends:
            self._record(failure)
        run_dir = self._written_to if ends else self.run_dir
        taken = {rank: text for rank, each in self._here.items() if (text := each.stacks.read())}
        exit_report.keep(failure, run_dir, taken)
        exit_report.keep_collectives(run_dir, self._rank)

    def _record(self, failure: Failure) -> None:
        """Write the failure, if it is to be written, and if the disk takes it."""
        run_dir = self.run_dir if self._refusals or failure.kind != "orderly" else None
        facts = {"status": failure.status, **failure.facts, "message": failure.message, "kind": failure.kind}
        if run_dir is not None and failure_file.write(run_dir, facts | {"attempt": self._attempt}):
            self._written_to = run_dir

    def leave_when_orphaned(self) -> None:
        """Exit if the launcher died and the stop that the kernel requested takes too long."""
        if os.getppid() == self._parent:
            return
        now = time.monotonic()
        self._orphan_since = self._orphan_since or now
        if now - self._orphan_since > ALONE_S - 1:
            words = "the launcher of this host died, and there was no time to save"
            self._record_orderly((self._rank,), 1, words)
            self._heartbeat.note(failure=1, status=1)  # or neighbours take this for a death
            exit_report.leave(1)

    def record_orderly(self, error: RunEndError) -> None:
        """Write an end that all ranks reach at the same place, unless another rank has."""
        if self._rank == 0 or self.run_dir is None or failure_file.read(self.run_dir) is None:
            self._record_orderly(error.ranks[:1], error.exit_code, str(error))

    def _record_orderly(self, about: tuple[int, ...], status: int, message: str) -> None:
        """`about`: a rank; none if the end is that of all, or it is unknown whose it is."""
        own = self._here[self._rank].observe()
        rank, host = (about[0], self._members[about[0]].hostname) if about else (None, None)
        facts: dict[str, Any] = {"rank": rank, "host": host, "phase": own.phase}
        facts |= {"where": own.where, "step": own.step, "silent_s": 0.0}
        self._record(Failure(about or (self._rank,), "orderly", status, message, facts))

    def print_at_exit(self) -> None:
        """Print the failure after the traceback: no other rank of this host is left to do so."""
        own = replace(self._here[self._rank].observe(), symptom=False)
        failure = diagnose([own], self._timeout_s, pressing=False)
        if failure is None:
            return
        self.reports.tell(self._observe(), eager=True)
        host = saving_host(self.reports.others(), ())
        failure = replace(failure, saving_host=self._own.host if host is None else host)
        failure = self._with_save(self._agreed(failure))
        self._write(failure)
        if len(self._members) > 1 or own.worker:
            atexit.register(exit_report.say, failure, len(self._members), self._written_to)
        elif self._heartbeat.finished:
            atexit.register(exit_report.print_line, failure.message.rpartition("; ")[2])


def _briefly(function: Callable[..., None], *arguments: Any) -> None:
    """Call it, and wait for 1 s at most: the disk may hang on the host that is lost."""
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    thread.join(timeout=1.0)
