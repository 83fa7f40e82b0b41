"""The end of a failed run: save the last step, print and write the failure, and exit."""

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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

_DEAD_S = 5.0  # time for the other ranks on this host to die, before the survivors continue
ALONE_S = 5.0  # time for the ranks to end by themselves after an orderly end, or the death of the launcher


class Ending:
    """The actions of a `Watch` at the end of a failed run.

    Attributes:
        reports: the exchange of reports with other hosts.
        save: saves this rank's state, or makes another rank save.
        survivors: the ranks, including this rank, that will continue without the failed ranks.
        run_dir: the directory of failure.json and stacks/; None before it exists.
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
        self._writes_orderly = True
        self._parent, self._orphan_since = os.getppid(), 0.0
        others = [member for member in members if member.rank not in here]
        first = [Observed(each.rank, each.host, each.hostname, each.pid, position=-1) for each in others]
        self.reports = HostReports(connect, self._own.host, first)
        self.save = SaveOnFailure(heartbeat, rank, here)
        self.survivors: tuple[int, ...] = ()
        self._cut: Callable[[], None] | None = None
        self._check_batch_sizes: Callable[[int], object] = lambda num_ranks: None

    def writes_to(self, run_dir: Path, orderly: bool = True) -> None:
        """Set the directory of failure.json and stacks/.

        Args:
            orderly: whether to also write failure.json for errors that all ranks raise (`RunEndError`).
        """
        self.run_dir, self._writes_orderly = run_dir, orderly

    def let_shrink(self, cut: Callable[[], None], check_batch_sizes: Callable[[int], object]) -> None:
        """Allow survivors to continue without the failed ranks (distributed.shrink).

        Args:
            cut: ends all waits of this process for other ranks.
            check_batch_sizes: raises UserError if a batch can't be divided among this number of ranks.
        """
        self._cut, self._check_batch_sizes = cut, check_batch_sizes

    def send_last_report(self) -> None:
        """Send a last report to the other hosts, because no rank on this host can report after it."""
        self._heartbeat.tick()  # so that no other rank on this host takes over in the meantime
        self.reports.close(self._observe())

    def _observe(self) -> list[Observed]:
        return [neighbour.observe() for neighbour in self._here.values()]

    def declare(self, failure: Failure, everyone: Sequence[Observed]) -> None:
        """End the run with `failure`, or with the failure that another host declared earlier."""
        culprit = next(rank for rank in everyone if rank.rank == failure.ranks[0])
        if failure.kind == "orderly" and culprit.ended_ago_s < ALONE_S:
            return  # usually, all ranks raise the same error
        if self.prints_traceback(failure):
            return
        failure = replace(failure, saving_host=saving_host(everyone, failure.ranks))
        self.end(self._agreed(self._with_survivors(failure, everyone)))

    def _agreed(self, failure: Failure) -> Failure:
        """Return the failure that a host declared first, or `failure` if the store does not respond.

        If the store doesn't respond, its host may be lost, so another host saves, too. After a network
        partition, both sides may save, which does no harm: run_dir has a lock, and the second rank finds the
        step already saved.
        """
        if (agreed := self.reports.agree(failure, timeout_s=1.0)) is not None:
            return agreed
        host = self._own.host if self._own.host <= 1 else None
        return replace(failure, saving_host=host, survivors=())

    def prints_traceback(self, failure: Failure) -> bool:
        """Return whether the failed rank is on this host and is still printing its traceback."""
        if failure.kind != "raised" or failure.ranks[0] not in self._here:
            return False
        culprit = self._here[failure.ranks[0]].observe()
        return culprit.state != "dead" and (culprit.ended_s or 0.0) < ALONE_S

    def end(self, failure: Failure) -> None:
        """Save, print and write the failure, kill the ranks on this host that cannot exit, and exit."""
        began = time.time()
        if failure.kind != "orderly" or failure.status == RetryableError.exit_code:
            failure = self._with_save(failure)
        if failure.survivors and len(self._here) == len(self._members):
            for neighbour in self._here.values():
                neighbour.look_for_death()  # another rank may have died during the save
            failure = self._with_survivors(failure, self._observe())
        if failure.survivors and self.save.is_saved:
            self._let_survivors_continue(failure)
            return
        _with_deadline(self._write, failure)
        exit_report.print_failure(failure, len(self._members), self._written_to)
        self._report_to_torchrun(failure, began)
        self.send_last_report()
        self._heartbeat.note(failure=failure.status, status=failure.status)
        self._kill_stuck(failure)
        exit_report.exit_now(failure.status)

    def _report_to_torchrun(self, failure: Failure, began: float) -> None:
        """Make torchrun name the failed rank as the root cause, even if another rank exits first."""
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
        noun = "rank" if len(failure.survivors) == 1 else "ranks"
        shown = f"{noun} {', '.join(map(str, failure.survivors))}"
        failure = failure.followed_by(f"continuing without a restart on {shown}")
        _with_deadline(self._write, failure, False)
        exit_report.print_line(f"\n{failure.message}")
        self._kill_stuck(failure)
        self._heartbeat.note(survivors=failure.survivors)
        self.continue_with(failure.survivors)

    def _with_survivors(self, failure: Failure, everyone: Sequence[Observed]) -> Failure:
        """Return `failure` with its survivors, or with the reason why there are none."""
        if self._cut is None:
            return failure
        # When a rank dies, torchrun kills its other ranks on the host.
        ranks = find_survivors(everyone, failure, by_host=self._own.error_file is not None)
        try:
            self._check_batch_sizes(len(ranks) or 1)
        except UserError as error:
            return replace(failure, survivors=()).followed_by(f"the other ranks cannot continue: {error}")
        return replace(failure, survivors=ranks)

    def continue_with(self, ranks: Sequence[int]) -> None:
        """Continue with the survivors `ranks`, or kill this process if it is not one of them."""
        if self._rank not in ranks:  # after a normal exit, launch=local would end all ranks
            os.kill(os.getpid(), signal.SIGKILL)
        deadline = time.monotonic() + _DEAD_S
        for neighbour in [each for rank, each in self._here.items() if rank not in ranks]:
            while not neighbour.look_for_death() and time.monotonic() < deadline:
                self.wait(0.01)  # rank 0 may still hold the lock of run_dir
        self.survivors = tuple(ranks)
        if self.save.last_step is not None:
            self.save.last_step.thaw()
        assert self._cut is not None
        self._cut()

    def _with_save(self, failure: Failure) -> Failure:
        self.reports.set_own(self._observe(), eager=True)
        return failure.followed_by(self.save.lead(failure, self.wait))

    def wait(self, seconds: float) -> None:
        """Sleep, and show the other ranks that this rank is awake."""
        self._heartbeat.tick()
        time.sleep(seconds)

    def exit(self, status: int) -> None:
        """Write this rank's last collectives, and exit with `status`, from this host's leader."""
        _with_deadline(exit_report.write_collectives, self.run_dir, self._rank)
        exit_report.exit_now(status)

    def _write(self, failure: Failure, ends: bool = True) -> None:
        """Write the failure to train.log and stacks/ and, if the run `ends`, to failure.json."""
        if ends:
            self._record(failure)
        run_dir = self._written_to if ends else self.run_dir
        texts = {rank: text for rank, each in self._here.items() if (text := each.stacks.read())}
        exit_report.write_logs(failure, run_dir, texts)
        exit_report.write_collectives(run_dir, self._rank)

    def _record(self, failure: Failure) -> None:
        """Write failure.json, except for an orderly end if `writes_to` got `orderly=False`."""
        run_dir = self.run_dir if self._writes_orderly or failure.kind != "orderly" else None
        facts = {"status": failure.status, **failure.facts, "message": failure.message, "kind": failure.kind}
        if run_dir is not None and failure_file.write(run_dir, facts | {"attempt": self._attempt}):
            self._written_to = run_dir

    def exit_when_orphaned(self) -> None:
        """Exit if the launcher has died and the orderly stop after its death takes too long."""
        if os.getppid() == self._parent:
            return
        now = time.monotonic()
        self._orphan_since = self._orphan_since or now
        if now - self._orphan_since > ALONE_S - 1:
            message = "the launcher of this host died, and there was no time to save"
            self._record_orderly((self._rank,), 1, message)
            self._heartbeat.note(failure=1, status=1)  # otherwise, the other ranks would report a death
            exit_report.exit_now(1)

    def record_orderly(self, error: RunEndError) -> None:
        """Write failure.json for an error that all ranks raise, unless another rank has written it."""
        if self._rank == 0 or self.run_dir is None or failure_file.read(self.run_dir) is None:
            self._record_orderly(error.ranks[:1], error.exit_code, str(error), error.facts)

    def _record_orderly(
        self, ranks: tuple[int, ...], status: int, message: str, more: Mapping[str, Any] | None = None
    ) -> None:
        """Write failure.json. `ranks` is empty if all ranks failed or the failed rank is unknown."""
        own = self._here[self._rank].observe()
        rank, host = (ranks[0], self._members[ranks[0]].hostname) if ranks else (None, None)
        facts: dict[str, Any] = {"rank": rank, "host": host, "phase": own.phase}
        facts |= {"where": own.where, "step": own.step, "silent_s": 0.0, **(more or {})}
        self._record(Failure(ranks or (self._rank,), "orderly", status, message, facts))

    def print_at_exit(self) -> None:
        """Print the failure after the traceback, because no other rank on this host can do so."""
        own = replace(self._here[self._rank].observe(), symptom=False)
        failure = diagnose([own], self._timeout_s, pressing=False)
        if failure is None:
            return
        self.reports.set_own(self._observe(), eager=True)
        host = saving_host(self.reports.others(), ())
        failure = replace(failure, saving_host=self._own.host if host is None else host)
        failure = self._with_save(self._agreed(failure))
        self._write(failure)
        if len(self._members) > 1 or own.worker:
            atexit.register(exit_report.print_failure, failure, len(self._members), self._written_to)
        elif self._heartbeat.finished:
            atexit.register(exit_report.print_line, failure.message.rpartition("; ")[2])


def _with_deadline(function: Callable[..., None], *arguments: Any) -> None:
    """Call `function` and wait for at most 1 s, because the disk of a lost host may hang."""
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    thread.join(timeout=1.0)
