"""A thread that reads heartbeats, reports the rank that failed first, and ends the ranks that wait for it.

Each rank has a watch. On each host, the lowest rank whose watch is awake leads: only this leader diagnoses
the failure, informs other hosts and prints; then the other ranks exit. All waits for the store, a rank or a
disk have short deadlines.
"""

import contextlib
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import Store

from trainer.errors import RunEndError, class_and_line
from trainer.failures import exit_report, stacks
from trainer.failures.diagnosis import ASLEEP_S, Observed, diagnose, slow, stand_still
from trainer.failures.ending import ALONE_S, Ending
from trainer.failures.heartbeat import Heartbeat, set_process_heartbeat
from trainer.failures.neighbour import TICK_S, Neighbour, RankIdentity, take_stacks
from trainer.failures.save_on_failure import SAVE_S

_SUSPICIOUS_S = 1.0  # minimum time without progress before the reports of other hosts are read
_SUSPICIOUS = 1 / 20  # the same, as a fraction of timeout_s: half of the silence that is reported as slow
_SETTLE_S = 2.0  # time after a suspension for all ranks to wake up
_GRACE_S = 2.2  # time after a communication error for the reports of other ranks to arrive
_FRESH_S = 2.0  # minimum time for which a stack counts as current


class Watch:
    """Monitors the ranks of a run, and ends the run if one of them fails.

    Args:
        launched: whether this process must not outlive its parent.

    Attributes:
        ending: the actions after a failure.
        timeout_s: the longest time that a rank may keep the others waiting.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        own_stacks: stacks.Stacks,
        rank: int,
        members: Sequence[RankIdentity],
        connect: Callable[[], Store],
        timeout_s: float,
        launched: bool,
    ) -> None:
        self._heartbeat, self._stacks, self.timeout_s = heartbeat, own_stacks, timeout_s
        self._rank, self._launched = rank, launched
        self._here: dict[int, Neighbour] = {}
        for member in members:
            if member.host == members[rank].host:  # and in one pid namespace
                with contextlib.suppress(OSError):  # gone, or belongs to another user
                    self._here[member.rank] = Neighbour(member)
        self._alone = len(members) == 1
        self.ending = Ending(heartbeat, rank, members, self._here, connect, timeout_s)
        self._reported_slow: tuple[int, int] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    # ---- called by the run

    def start(self) -> None:
        self._stacks.open(crashes=len(self._here) > 1)  # only if another rank can read them
        self._heartbeat.tick()
        self._heartbeat.beat()  # the wait for other ranks in the rendezvous was not a silence
        set_process_heartbeat(self._heartbeat)
        self._thread.start()

    def close(self) -> None:
        """Stop the watch after a success, or if the end of the run is reported in another way."""
        self._stop_looking()
        self.ending.reports.close()
        self._stacks.close()
        for neighbour in self._here.values():
            neighbour.close()

    def ended_well(self) -> None:
        """Record that this rank has finished, so that other ranks do not report it as dead."""
        self._heartbeat.note(status=0, at_ns=time.monotonic_ns())
        self._stop_looking()
        # Only the last rank on a host sees that all ranks have ended; no other rank can report after it.
        is_last = all(neighbour.observe().status == 0 for neighbour in self._here.values())
        if is_last:
            self.ending.send_last_report()
        self.close()
        # Break a reference cycle through the whole run: a DataLoader that the garbage collector deletes waits
        # 5 s for each of its workers.
        self.ending.save.last_step = None

    def _stop_looking(self) -> None:
        self._closed.set()
        self._thread.join()

    def end_or_continue(self, error: BaseException, symptom: bool) -> tuple[int, ...]:
        """Record for the other ranks that this rank ends with `error`.

        If the error is a `symptom`, which another rank may have caused, the watch ends the process when it
        knows the cause, unless survivors continue. In that case, the method returns only if there are
        survivors, or if the watch itself fails.

        Returns:
            The survivors, including this rank; empty if this rank ends.
        """
        in_worker = getattr(error, "where", None)
        note: dict[str, Any] = {
            "status": error.exit_code if isinstance(error, RunEndError) else 1,
            "error": class_and_line(error).encode(errors="backslashreplace").decode()[:1000],
            "where": in_worker or stacks.where(stacks.frames_of_exception(error)),
            "orderly": isinstance(error, RunEndError),
            "symptom": symptom and not self._alone,
            "worker": None if in_worker else self._here[self._rank].stuck_worker(str(error)),
            "at_ns": time.monotonic_ns(),
        }
        self._heartbeat.note(**note)
        is_last = all("status" in other.records.notes() for other in self._others_here())
        may_continue = symptom or not isinstance(error, RunEndError)
        if note["symptom"] or (may_continue and self.ending.survivors):
            self._closed.wait(_GRACE_S + ALONE_S)
            if self.ending.save.has_begun:
                self._closed.wait(SAVE_S)
        survivors = self.ending.survivors if may_continue else ()
        if not survivors and not note["symptom"]:  # with a symptom, the watch itself has failed
            if isinstance(error, RunEndError):
                self.ending.record_orderly(error)
            elif is_last:
                self._stop_looking()  # otherwise, it might end this process during the save
                self.ending.print_at_exit()
        self._here[self._rank].end_workers(idle=bool(survivors))
        holds_store = self._rank == 0 and not self._launched
        if (is_last or holds_store) and not survivors and not note["symptom"]:
            self.ending.send_last_report()
        self.close()
        return survivors

    # ---- the thread

    def _run(self) -> None:
        poll = select.poll()
        for neighbour in self._others_here():
            if neighbour.death_fd != -1:
                poll.register(neighbour.death_fd, select.POLLIN)
        while not self._closed.is_set():
            for fd, _ in poll.poll(TICK_S * 1e3):
                poll.unregister(fd)
            try:
                self._look()
            except Exception as error:  # a bug in the watch must not end a healthy run
                line = f"[rank {self._rank}] the check for failed ranks raised an error and is repeated"
                exit_report.print_line(f"{line}: {error!r}")
                time.sleep(ALONE_S)
            if self.ending.survivors:
                self._closed.set()
            # After the look, which shows that this rank is awake. C code that holds the GIL releases it for a
            # moment at each signal, such as a request for its stack.
            self._heartbeat.tick()

    def _look(self) -> None:
        if self._launched:
            self.ending.exit_when_orphaned()
        for neighbour in self._others_here():
            neighbour.look_for_death()
        for neighbour in self._others_here():
            notes = neighbour.records.notes()
            if "failure" in notes:
                self.ending.exit(int(notes["failure"]))
            if ranks := notes.get("survivors"):
                self.ending.continue_with(ranks)
                return
        if self._closed.is_set():
            return
        self.ending.save.serve()
        reports = self.ending.reports
        if not self._leads():
            reports.stop()  # this rank may have led while a lower rank was asleep
            return
        here = self._observe()
        if time.monotonic_ns() - self._here[self._rank].records.main().resumed_ns < _SETTLE_S * 1e9:
            reports.resumed()
            return
        suspicious_s = max(_SUSPICIOUS_S, _SUSPICIOUS * self.timeout_s)
        suspicious = any(rank.silent_s > suspicious_s or rank.status or rank.state == "dead" for rank in here)
        reports.set_own(here, eager=suspicious)
        if reports.failure is not None and not self.ending.prints_traceback(reports.failure):
            self.ending.end(reports.failure)
        elif suspicious:
            self._diagnose(here, reports.others())
        else:
            reports.suspicion = None

    def _observe(self) -> list[Observed]:
        """Observe the ranks on this host. The time during which all of them were suspended doesn't count."""
        alive = [each.records for each in self._here.values() if each.died_at_ns is None]
        since_ns = min((own.main().resumed_ns for own in alive if "status" not in own.notes()), default=0)
        return [neighbour.observe(since_ns) for neighbour in self._here.values()]

    def _diagnose(self, here: list[Observed], elsewhere: list[Observed]) -> None:
        everyone = sorted(here + elsewhere, key=lambda rank: rank.rank)
        if self._alone or all(rank.orderly or rank.status == 0 for rank in everyone):
            return  # there are no other ranks, or all ranks end by themselves
        since_symptom = max((rank.ended_s or 0.0 for rank in everyone if rank.symptom), default=0.0)
        pressing = since_symptom >= _GRACE_S
        almost_late = max(rank.silent_s for rank in here) > 0.8 * self.timeout_s
        # All ranks may be in the same phase, such as a gather of FSDP. Then only stacks show who waits.
        still = stand_still(everyone, max(1.0, self.timeout_s / 10))
        asks = pressing or since_symptom > 1 or almost_late or still
        if asks and take_stacks(self._here.values(), fresh_s=max(_FRESH_S, self.timeout_s / 10)):
            return  # continue with the stacks in the next look
        failure = diagnose(everyone, self.timeout_s, pressing)
        if failure is not None:
            is_fact = failure.kind not in ("stopped", "hangs")
            suspicion = (failure.ranks, failure.facts["phase"], failure.facts["step"])
            host = next(rank.host for rank in everyone if rank.rank == failure.ranks[0])
            if is_fact or self.ending.reports.confirmed(suspicion, host):
                self.ending.declare(failure, everyone)
        elif still and (slowest := slow(everyone)) is not None:
            if self.ending.reports.confirmed((slowest.rank, slowest.position), slowest.host):
                self._report_slow(slowest)
        else:
            self.ending.reports.suspicion = None

    def _leads(self) -> bool:
        """Return whether this is the lowest rank on the host that is awake and has not ended."""
        for rank, neighbour in sorted(self._here.items()):
            if rank == self._rank:
                return True
            beat = neighbour.records.main()
            awake = time.monotonic_ns() - beat.tick_ns < ASLEEP_S * 1e9
            notes = neighbour.records.notes()
            if awake and neighbour.died_at_ns is None and ("status" not in notes or notes.get("symptom")):
                return False
        return True

    def _others_here(self) -> list[Neighbour]:
        return [neighbour for rank, neighbour in self._here.items() if rank != self._rank]

    # ---- lines during the run

    def _report_slow(self, slowest: Observed) -> None:
        if self._reported_slow != (slowest.rank, slowest.position):
            self._reported_slow = (slowest.rank, slowest.position)
            at = f", at {slowest.where}" if slowest.where else ""
            text = f"{slowest.name} has been in {slowest.doing} for {slowest.silent_s:.1f} s{at}"
            parts = [text, slowest.worker, "the other ranks are waiting for it"]
            exit_report.print_line("; ".join(filter(None, parts)))
