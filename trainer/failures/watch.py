"""A thread that reads the heartbeats: it names the rank that stopped first, and ends those that wait for it.

Each rank has one. The first rank of a host that is awake leads: it alone judges, informs other hosts and
prints; the others exit when it has. Each wait for the store, a peer or a disk has a short deadline.
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
from trainer.failures.heartbeat import Heartbeat, set_mine
from trainer.failures.neighbour import TICK_S, Neighbour, RankIdentity, take_stacks
from trainer.failures.save_on_failure import SAVE_S

_SUSPICIOUS_S = 1.0  # without progress, at least: then look at the other hosts too
_SUSPICIOUS = 1 / 20  # of timeout_s: half of the silence that a line names
_SETTLE_S = 2.0  # after a suspension, until all ranks are awake
_GRACE_S = 2.2  # from a failed communication until the others' reports are in, or missing
_FRESH_S = 2.0  # a stack is current for at least this long


class Watch:
    """What this rank knows of the others, and the reaction of the run when one of them fails.

    Args:
        connect: opens a connection to the store of this attempt.
        timeout_s: how long a rank may keep the others waiting.
        launched: by a process that the run must not outlive.

    Attributes:
        ending: what happens once a rank has failed.
        timeout_s: the longest wait of a rank for another.
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
                with contextlib.suppress(OSError):  # gone, or of another user: known only from reports
                    self._here[member.rank] = Neighbour(member)
        self._alone = len(members) == 1
        self.ending = Ending(heartbeat, rank, members, self._here, connect, timeout_s)
        self._named_slow: tuple[int, int] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    # ---- called by the run

    def start(self) -> None:
        self._stacks.open(crashes=len(self._here) > 1)  # others read them
        self._heartbeat.tick()
        self._heartbeat.beat()  # all have met: the wait for them was not a silence
        set_mine(self._heartbeat)
        self._thread.start()

    def close(self) -> None:
        """End the watch after a success, or when the end is reported in another way."""
        self._stop_looking()
        self.ending.reports.close()
        self._stacks.close()
        for neighbour in self._here.values():
            neighbour.close()

    def ended_well(self) -> None:
        """Record that this rank is done, so that ranks still at work do not miss it."""
        self._heartbeat.note(status=0, at_ns=time.monotonic_ns())
        self._stop_looking()
        # Only the last rank of a host sees that all have ended, and no other can report after it.
        is_last = all(neighbour.observe().status == 0 for neighbour in self._here.values())
        if is_last:
            self.ending.send_last_report()
        self.close()
        # It leads back here through the whole run. DataLoader, when left to the garbage collector, waits 5 s
        # for each of its workers.
        self.ending.save.last_step = None

    def _stop_looking(self) -> None:
        self._closed.set()
        self._thread.join()

    def end_or_continue(self, error: BaseException, symptom: bool) -> tuple[int, ...]:
        """Record that this rank ends with `error`, for the others, and return the ranks that go on.

        With a `symptom`, an error that another rank may have caused, this returns only if the watch itself
        fails, or if ranks go on without others: otherwise the watch ends the process once the cause is known.

        Returns:
            The ranks that go on, this one among them; none if it ends.
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
        if not survivors and not note["symptom"]:  # with one, the watch itself has failed
            if isinstance(error, RunEndError):
                self.ending.record_orderly(error)
            elif is_last:
                self._stop_looking()  # or it ends this process, for a rank that ended before, while it saves
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
            except Exception as error:  # a bug in here must not end a healthy run
                exit_report.print_line(f"[rank {self._rank}] the watch cannot look: {error!r}")
                time.sleep(ALONE_S)
            if self.ending.survivors:
                self._closed.set()
            # Not before, since a rank that has looked counts as awake. C code that holds the interpreter lets
            # it go for a moment at each signal, such as a question for its stack.
            self._heartbeat.tick()

    def _look(self) -> None:
        if self._launched:
            self.ending.leave_when_orphaned()
        for neighbour in self._others_here():
            neighbour.look_for_death()
        for neighbour in self._others_here():
            notes = neighbour.records.notes()
            if "failure" in notes:
                self.ending.leave(int(notes["failure"]))
            if ranks := notes.get("survivors"):
                self.ending.continue_with(ranks)
                return
        if self._closed.is_set():
            return
        self.ending.save.serve()
        reports = self.ending.reports
        if not self._leads():
            reports.rest()  # it may have led while a lower rank was asleep
            return
        here = self._observe()
        if time.monotonic_ns() - self._here[self._rank].records.main().resumed_ns < _SETTLE_S * 1e9:
            reports.resumed()
            return
        suspicious_s = max(_SUSPICIOUS_S, _SUSPICIOUS * self.timeout_s)
        suspicious = any(rank.silent_s > suspicious_s or rank.status or rank.state == "dead" for rank in here)
        reports.tell(here, eager=suspicious)
        if reports.failure is not None and not self.ending.prints_traceback(reports.failure):
            self.ending.end(reports.failure)
        elif suspicious:
            self._diagnose(here, reports.others())
        else:
            reports.suspicion = None

    def _observe(self) -> list[Observed]:
        """The ranks of this host. Time in which none of them ran has not passed: a suspension."""
        alive = [each.records for each in self._here.values() if each.died_at_ns is None]
        since_ns = min((own.main().resumed_ns for own in alive if "status" not in own.notes()), default=0)
        return [neighbour.observe(since_ns) for neighbour in self._here.values()]

    def _diagnose(self, here: list[Observed], elsewhere: list[Observed]) -> None:
        everyone = sorted(here + elsewhere, key=lambda rank: rank.rank)
        if self._alone or all(rank.orderly or rank.status == 0 for rank in everyone):
            return  # it blocks no rank, or each ends by itself
        since_symptom = max((rank.ended_s or 0.0 for rank in everyone if rank.symptom), default=0.0)
        pressing = since_symptom >= _GRACE_S
        almost_late = max(rank.silent_s for rank in here) > 0.8 * self.timeout_s
        # All may be in one phase, such as a gather of FSDP: only stacks show which rank does not wait.
        still = stand_still(everyone, max(1.0, self.timeout_s / 10))
        asks = pressing or since_symptom > 1 or almost_late or still
        if asks and take_stacks(self._here.values(), fresh_s=max(_FRESH_S, self.timeout_s / 10)):
            return  # look again, with the stacks
        failure = diagnose(everyone, self.timeout_s, pressing)
        if failure is not None:
            is_fact = failure.kind not in ("stopped", "hangs")
            of = (failure.ranks, failure.facts["phase"], failure.facts["step"])
            host = next(rank.host for rank in everyone if rank.rank == failure.ranks[0])
            if is_fact or self.ending.reports.confirmed(of, host):
                self.ending.give(failure, everyone)
        elif still and (found := slow(everyone)) is not None:
            if self.ending.reports.confirmed((found.rank, found.position), found.host):
                self._name_slow(found)
        else:
            self.ending.reports.suspicion = None

    def _leads(self) -> bool:
        """Whether no lower rank of this host is awake and still takes part."""
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

    def _name_slow(self, found: Observed) -> None:
        if self._named_slow != (found.rank, found.position):
            self._named_slow = (found.rank, found.position)
            at = f", at {found.where}" if found.where else ""
            words = f"{found.name} has been in {found.doing} for {found.silent_s:.1f} s{at}"
            exit_report.print_line("; ".join(filter(None, [words, found.worker, "the others wait for it"])))
