"""A thread that reads the heartbeats: it names the rank that stopped first, and ends those that wait for it.

Each rank has one. The first rank of a host that is awake leads: it alone judges, informs other hosts and
prints; the others exit when it has. Each wait for the store, a peer or a disk has a short deadline.
"""

import atexit
import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import RunEndError, in_a_line
from trainer.faults import exit_report, processes, stacks
from trainer.faults.debounce import Debounce
from trainer.faults.disk_progress import set_mine
from trainer.faults.heartbeat import Heartbeat
from trainer.faults.kill_timer import KillTimer
from trainer.faults.neighbour import TICK_S, Neighbour, RankIdentity
from trainer.faults.reports import Reports
from trainer.faults.rescue import SAVE_S, LastStep, Rescue, choose, with_words
from trainer.faults.verdict import ASLEEP_S, Observed, Verdict, judge, slow, stand_still

if TYPE_CHECKING:
    from torch.distributed import Store

_SUSPICIOUS_S = 1.0  # without progress: then look at the other hosts too
_GRACE_S = 2.2  # from a failed communication until the others' reports are in, or missing
_ALONE_S = 5.0  # how long the others may take to end after a rank's orderly end, or their launcher's
_FRESH_S = 2.0  # a stack is current for at least this long
_KILL_TIMER_S = 4.0  # beyond timeout_s


class Watch:
    """What this rank knows of the others, and the reaction of the run when one of them fails.

    Args:
        connect: opens a connection to the store of this attempt; None if there is none.
        timeout_s: how long a rank may keep the others waiting.
        launched: by a process that the run must not outlive.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        own_stacks: stacks.Stacks,
        rank: int,
        members: Sequence[RankIdentity],
        connect: Callable[[], "Store"] | None,
        timeout_s: float,
        launched: bool = False,
    ) -> None:
        # Launchers of several hosts may count restarts differently.
        self._attempt, self._launched = max(member.attempt for member in members), launched
        self._heartbeat, self._stacks, self._timeout_s = heartbeat, own_stacks, timeout_s
        self._rank, self._members, self._connect = rank, list(members), connect
        self._own = next(member for member in members if member.rank == rank)
        self._run_dir: Path | None = None
        self._refusals = True
        self._here: dict[int, Neighbour] = {}
        for member in members:
            if member.host == self._own.host:
                with contextlib.suppress(OSError):  # in another container: known only from reports
                    self._here[member.rank] = Neighbour(member)
        self._alone = len(members) == 1
        self._reports: Reports | None = None
        self._rescue = Rescue(heartbeat, rank, self._here)
        self._kill_timer = KillTimer(timeout_s + _KILL_TIMER_S)
        self._memory_kills = processes.MemoryKills(neighbour.member.pid for neighbour in self._here.values())
        self._parent, self._orphan_since = os.getppid(), 0.0
        self._named_slow: tuple[int, int] | None = None
        self._suspicion, self._slowness = Debounce(), Debounce()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    # ---- called by the run

    def start(self) -> None:
        heard_by_others = len(self._here) > 1
        self._stacks.open(crashes=heard_by_others)
        self._heartbeat.tick()
        self._heartbeat.progress()  # all have met: the wait for them was not a silence
        set_mine(self._heartbeat)
        self._thread.start()

    def writes_to(self, run_dir: Path, refusals: bool = True) -> None:
        """Set the directory of failure.json and stacks/.

        Args:
            refusals: whether to write an orderly end, too.
        """
        self._run_dir, self._refusals = run_dir, refusals

    def saves(self, last_step: LastStep) -> None:
        """Set what saves the last finished step at a fault."""
        self._rescue.last_step = last_step

    def _where_to_write(self, verdict: Verdict) -> Path | None:
        return self._run_dir if self._refusals or verdict.kind != "orderly" else None

    def close(self) -> None:
        """End the watch after a success, or when the end is reported in another way."""
        self._stop_looking()
        self.let_go_of_store()
        self._stacks.close()
        for neighbour in self._here.values():
            neighbour.close()

    def let_go_of_store(self) -> None:
        """Disconnect: a store in a file must be removed before another run uses it."""
        self._connect = None
        if self._reports is not None:
            self._reports.close()

    def ended_well(self) -> None:
        """Record that this rank is done, so that ranks still at work do not miss it."""
        self._heartbeat.note({"status": 0, "at_ns": time.monotonic_ns()})
        self._stop_looking()
        # Only the last rank of a host sees that all have ended, and no other can report after it.
        is_last = all(neighbour.observe().status == 0 for neighbour in self._here.values())
        if is_last:
            self._send_last_report()
        self.close()

    def _stop_looking(self) -> None:
        self._closed.set()
        self._thread.join()  # wait until it no longer postpones the timer; it runs every TICK_S
        self._kill_timer.cancel()

    def failed(self, error: BaseException, symptom: bool) -> None:
        """Record that this rank ends with `error`, for the others.

        With a `symptom`, an error that another rank may have caused, this returns only if the watch itself
        fails: otherwise the watch ends the process once the cause is known.
        """
        in_worker = getattr(error, "where", None)
        note: dict[str, Any] = {
            "status": _status(error),
            "error": _last_line(error),
            "where": in_worker or stacks.where(stacks.frames_of_exception(error)),
            "orderly": isinstance(error, RunEndError),
            "symptom": symptom and not self._alone,
            "peer": getattr(error, "peer", None),
            "worker": None
            if in_worker
            else self._here[self._rank].stuck_worker(self._memory_kills, str(error)),
            "at_ns": time.monotonic_ns(),
        }
        self._heartbeat.note(note)
        is_last = all(other.records.note() is not None for other in self._others_here())
        if note["symptom"]:
            self._closed.wait(_GRACE_S + _ALONE_S)
            if self._rescue.has_begun:
                self._closed.wait(SAVE_S)
        elif isinstance(error, RunEndError):
            if self._rank == 0 or self._run_dir is None or exit_report.read_failure(self._run_dir) is None:
                about = self._members[error.ranks[0] if error.ranks else self._rank]
                own = self._here[self._rank].observe()  # all ranks raise it at the same place
                own = replace(own, rank=about.rank, host=about.host, hostname=about.hostname, pid=about.pid)
                verdict = exit_report.of_one(own, _status(error), str(error))
                exit_report.write(verdict, self._where_to_write(verdict), self._attempt)
        elif is_last:
            self._stop_looking()  # or it ends this process, for a rank that ended before, while it saves
            self._print_at_exit()
        self._here[self._rank].end_workers()
        holds_store = self._rank == 0 and not self._launched
        if (is_last or holds_store) and not note["symptom"]:
            self._send_last_report()
        self.close()

    def _send_last_report(self, lost: Container[int] = ()) -> None:
        """Send the other hosts a last report: no rank of this host can report later."""
        if reports := self._reports_of_other_hosts():
            self._heartbeat.tick()  # it may take a moment, in which no neighbour should take over
            reports.close([neighbour.observe() for neighbour in self._here.values()], lost)

    # ---- the thread

    def _run(self) -> None:
        poll = select.poll()
        for neighbour in self._others_here():
            if neighbour.death_fd != -1:
                poll.register(neighbour.death_fd, select.POLLIN)
        while not self._closed.is_set():
            for fd, _ in poll.poll(TICK_S * 1e3):
                poll.unregister(fd)
            self._tick()
            try:
                self._look()
            except Exception as error:  # a bug in here must not end a healthy run
                exit_report.print_line(f"[rank {self._rank}] the watch cannot look: {error!r}")
                time.sleep(_ALONE_S)

    def _tick(self) -> None:
        self._heartbeat.tick()
        # Not in the set-up, where torch waits for peers while it holds the interpreter.
        if not self._alone and self._heartbeat.step:
            self._kill_timer.put_off()

    def _look(self) -> None:
        self._leave_when_orphaned()
        self._stacks.add_other_threads()
        for neighbour in self._others_here():
            neighbour.look_for_death()
        for neighbour in self._others_here():
            note = neighbour.records.note() or {}
            if "verdict" in note:
                exit_report.leave(int(note["verdict"]))
        if self._closed.is_set():
            return
        self._rescue.serve()
        if not self._leads():
            if self._reports is not None:  # it led while a lower rank was asleep
                self._reports.rest()
            return
        here = [neighbour.observe() for neighbour in self._here.values()]
        suspicious = any(
            rank.silent_s > _SUSPICIOUS_S or rank.status or rank.state == "dead" for rank in here
        )
        reports = self._reports_of_other_hosts()
        if reports is not None:
            reports.tell(here, eager=suspicious)
            if reports.verdict is not None and not self._prints_traceback(reports.verdict):
                self._end(reports.verdict)
        if suspicious:
            self._judge(here, reports.others() if reports else [])
        else:
            self._suspicion.clear()
            self._slowness.clear()

    def _judge(self, here: list[Observed], elsewhere: list[Observed]) -> None:
        everyone = sorted(here + elsewhere, key=lambda rank: rank.rank)
        if all(rank.orderly or rank.status == 0 for rank in everyone):
            return  # each rank ends by itself
        left = [rank for rank in everyone if rank.status != 0]
        if self._alone or (len(left) == 1 and left[0].status is None):
            self._report_a_silence()
            return
        since_symptom = max((rank.ended_s or 0.0 for rank in everyone if rank.symptom), default=0.0)
        pressing = since_symptom >= _GRACE_S
        almost_late = max(rank.silent_s for rank in here) > 0.8 * self._timeout_s
        # All may be in one phase, such as a gather of FSDP: only stacks show which rank does not wait.
        still = stand_still(everyone, max(1.0, self._timeout_s / 10))
        aborted = any("SIGABRT" in (rank.ending or "") for rank in here)  # the others' positions show why
        if (pressing or since_symptom > 1 or almost_late or still or aborted) and self._take_stacks():
            return  # look again, with the stacks
        verdict = judge(everyone, self._timeout_s, pressing)
        counts = self._reports.counts if self._reports else {}
        if verdict is not None:
            is_fact = verdict.kind not in ("stopped", "hangs")
            of = (verdict.ranks, verdict.facts["phase"], verdict.facts["step"])
            host = self._members[verdict.ranks[0]].host
            if is_fact or self._suspicion.confirmed(of, host, counts):
                self._give(verdict, everyone)
            return
        self._suspicion.clear()
        found = slow(everyone) if still else None
        if found is None:
            self._slowness.clear()
        elif self._slowness.confirmed((found.rank, found.position), found.host, counts):
            self._name_slow(found)

    def _leads(self) -> bool:
        """Whether no lower rank of this host is awake and still takes part."""
        for rank, neighbour in sorted(self._here.items()):
            if rank == self._rank:
                return True
            beat = neighbour.records.main()
            awake = time.monotonic_ns() - beat.tick_ns < ASLEEP_S * 1e9
            note = neighbour.records.note()
            if awake and neighbour.died_at_ns is None and (note is None or note.get("symptom")):
                return False
        return True

    def _others_here(self) -> list[Neighbour]:
        return [neighbour for rank, neighbour in self._here.items() if rank != self._rank]

    def _reports_of_other_hosts(self) -> Reports | None:
        others = [member for member in self._members if member.rank not in self._here]
        if self._reports is None and others and self._connect is not None:
            first = [
                Observed(member.rank, member.host, member.hostname, member.pid, position=-1)
                for member in others
            ]
            self._reports = Reports(self._connect, self._own.host, first, len(self._members))
        return self._reports

    def _take_stacks(self) -> bool:
        """Ask the ranks of this host, and their busy data workers, for their stacks; False if known."""
        wanted = []
        for neighbour in self._here.values():
            position = neighbour.records.main().position
            # A phase may be long, such as the set-up.
            fresh = time.monotonic() - neighbour.frames_at_s < max(_FRESH_S, self._timeout_s / 10)
            known = fresh and neighbour.frames is not None and neighbour.frames[0] == position
            if not known and neighbour.died_at_ns is None and neighbour.observe().state == "running":
                wanted.append((neighbour, position))
        if not wanted:
            return False
        texts = stacks.ask([(neighbour.member.pid, neighbour.stacks) for neighbour, _ in wanted])
        for (neighbour, position), text in zip(wanted, texts, strict=True):
            neighbour.frames = (position, stacks.frames_of(text) if text else [])
            neighbour.frames_at_s = time.monotonic()
            neighbour.worker_words = neighbour.stuck_worker(self._memory_kills)
        return True

    def _give(self, verdict: Verdict, everyone: Sequence[Observed]) -> None:
        """Give this host's verdict, unless another's was earlier."""
        culprit = next(rank for rank in everyone if rank.rank == verdict.ranks[0])
        if verdict.kind == "orderly" and culprit.ended_ago_s < _ALONE_S:
            return  # all ranks reach such an end by themselves, if they can
        if self._prints_traceback(verdict):
            return
        if verdict.kind == "died" and "SIGKILL" in (culprit.ending or "SIGKILL"):
            words = self._memory_kills.words() if culprit.rank in self._here else None
            verdict = replace(verdict, message=verdict.message + (f"; {words}" if words else ""))
        self._end(self._agreed(replace(verdict, saver=choose(everyone, verdict.ranks))))

    def _agreed(self, verdict: Verdict) -> Verdict:
        """The first verdict that a host has given; if the store does not answer, this one, and no save."""
        if (reports := self._reports_of_other_hosts()) is not None:
            return reports.agree(verdict, timeout_s=1.0)
        return verdict if len(self._here) == len(self._members) else replace(verdict, saver=None)

    def _prints_traceback(self, verdict: Verdict) -> bool:
        """Whether the verdict is about a rank of this host that is exiting: its traceback comes first."""
        if verdict.kind != "raised" or verdict.ranks[0] not in self._here:
            return False
        culprit = self._here[verdict.ranks[0]].observe()
        return culprit.state != "dead" and (culprit.ended_s or 0.0) < _ALONE_S

    # ---- the end

    def _end(self, verdict: Verdict) -> None:
        """Save, print the verdict, write it, and exit; kill the ranks of this host that cannot exit."""
        if verdict.kind != "orderly":
            verdict = with_words(verdict, self._rescue.lead(verdict, self._wait))
        exit_report.say(verdict, len(self._members), self._run_dir)
        writing = threading.Thread(target=self._write, args=(verdict,), daemon=True)
        writing.start()
        writing.join(timeout=1.0)  # the disk may hang on the host that is lost
        if verdict.kind in ("raised", "died") and verdict.ranks[0] in self._here:
            exit_report.let_torchrun_look()
        self._send_last_report(
            lost={self._members[rank].host for rank in verdict.ranks if verdict.kind == "lost"}
        )
        self._heartbeat.note({"verdict": verdict.status, "status": verdict.status})
        for neighbour in self._others_here():
            stuck = neighbour.member.rank in verdict.ranks and verdict.kind in ("stopped", "hangs")
            if neighbour.died_at_ns is None and (stuck or neighbour.observe().asleep_s > ASLEEP_S):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(neighbour.member.pid, signal.SIGKILL)
        exit_report.leave(verdict.status)

    def _wait(self, seconds: float) -> None:
        self._tick()
        time.sleep(seconds)

    def _write(self, verdict: Verdict) -> None:
        run_dir = self._where_to_write(verdict)
        exit_report.write(verdict, run_dir, self._attempt)
        taken = {rank: neighbour.stacks.read() for rank, neighbour in self._here.items()}
        exit_report.keep(verdict, run_dir, {rank: text for rank, text in taken.items() if text})

    def _leave_when_orphaned(self) -> None:
        """Exit if the launcher died and the stop that the kernel requested takes too long."""
        if os.getppid() == self._parent:
            return
        now = time.monotonic()
        self._orphan_since = self._orphan_since or now
        if self._launched and now - self._orphan_since > _ALONE_S - 1:
            own = self._here[self._rank].observe()
            words = "the launcher of this host died, and there was no time to save"
            verdict = exit_report.of_one(own, 1, words)
            exit_report.write(verdict, self._where_to_write(verdict), self._attempt)
            self._heartbeat.note({"verdict": 1, "status": 1})  # or neighbours take this for a death
            exit_report.leave(1)

    def _print_at_exit(self) -> None:
        """Print the verdict after the traceback: no other rank of this host is left to do so."""
        own = replace(self._here[self._rank].observe(), symptom=False)
        verdict = judge([own], self._timeout_s, pressing=False)
        if verdict is None:
            return
        reports = self._reports_of_other_hosts()
        elsewhere = choose(reports.others(), ()) if reports is not None else None
        verdict = self._agreed(replace(verdict, saver=self._rank if elsewhere is None else elsewhere))
        words = self._rescue.alone() if verdict.saver in self._here else ""
        verdict = with_words(verdict, words)
        self._write(verdict)
        if not self._alone or own.worker:
            atexit.register(exit_report.say, verdict, len(self._members), self._run_dir)
        elif words:
            atexit.register(exit_report.print_line, words)

    # ---- lines during the run

    def _name_slow(self, found: Observed, others_wait: bool = True) -> None:
        if self._named_slow != (found.rank, found.position):
            self._named_slow = (found.rank, found.position)
            at = f", at {found.where}" if found.where else ""
            words = f"{found.name} has been in {found.doing} for {found.silent_s:.1f} s{at}"
            more = [found.worker, "the others wait for it" if others_wait else None]
            exit_report.print_line("; ".join([words, *filter(None, more)]))

    def _report_a_silence(self) -> None:
        """A process that is alone, or the last, blocks no rank: print where it is, and let it continue."""
        own = self._here[self._rank].observe()
        if own.silent_s > self._timeout_s and own.status is None:
            self._take_stacks()
            self._name_slow(self._here[self._rank].observe(), others_wait=False)


def _status(error: BaseException) -> int:
    return error.exit_code if isinstance(error, RunEndError) else 1


def _last_line(error: BaseException) -> str:
    return in_a_line(error).encode(errors="backslashreplace").decode()[:1000]
