"""A thread that looks at the heartbeats: it names who stopped first, and ends the ranks that wait for it.

Each rank has one. The first of a host that is awake leads: it alone judges, tells other hosts and speaks;
the others leave when it has. Nothing here waits for the store, a peer or a disk without a short deadline.
"""

import atexit
import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import RunEndError
from trainer.faults import failure, processes, stacks
from trainer.faults.heartbeat import Beat, Heartbeat, Records, set_mine
from trainer.faults.last_resort import LastResort
from trainer.faults.reports import Reports
from trainer.faults.verdict import ASLEEP_S, Observed, Verdict, judge, slow

if TYPE_CHECKING:
    from torch.distributed import Store

_TICK_S = 0.2
_SUSPICIOUS_S = 1.0  # without progress: from then on, look at the other hosts too
_GRACE_S = 2.2  # from a failed communication until the others have said why, and are heard of or not
_ALONE_S = 5.0  # how long the others may take to end alike after a rank's orderly end, or their launcher's
_LAST_RESORT_S = 4.0  # beyond timeout_s


@dataclass(frozen=True)
class Member:
    """A rank, as it introduced itself to the others."""

    rank: int
    host: int
    hostname: str
    pid: int
    heartbeat_fd: int
    stacks_fd: int
    attempt: int  # how often its launcher says that it has restarted the run


def introduction(rank: int, heartbeat: Heartbeat, own_stacks: stacks.Stacks) -> dict[str, Any]:
    """What a `Member` is made of, but for the index of its host, which is known once all have met."""
    return {
        "rank": rank,
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "heartbeat_fd": heartbeat.fd,
        "stacks_fd": own_stacks.fd,
        "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
    }


class _Neighbour:
    """A rank of this host, perhaps this one: all that can be seen of it, also after its death."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.records = Records.of(member.pid, member.heartbeat_fd)
        self.stacks = stacks.StackReader(member.pid, member.stacks_fd)
        self.death_fd = processes.watch_for_death(member.pid)
        self.died_at_ns: int | None = None
        self.ending: str | None = None
        self.frames: tuple[int, list[stacks.Frame]] | None = None  # taken at which position
        self.worker_words: str | None = None

    def close(self) -> None:
        self.stacks.close()
        if self.death_fd != -1:
            os.close(self.death_fd)

    def look_for_death(self) -> None:
        if self.died_at_ns is None and processes.state(self.member.pid) == "dead":
            self.died_at_ns = time.monotonic_ns()
            self.ending = processes.ending(self.member.pid)

    def observe(self) -> Observed:
        beat, note, now = self.records.main(), self.records.note() or {}, time.monotonic_ns()
        member, frames = self.member, None
        if self.frames is not None and self.frames[0] == beat.position:
            frames = self.frames[1]
        state = "running"
        if self.died_at_ns is not None:
            state = "dead"
            text = self.stacks.read()
            frames = stacks.frames_of(text) if "Fatal Python" in text else None
        elif now - beat.tick_ns > 2e9 * _TICK_S:
            state = processes.state(member.pid)
        progress_ns = max([beat.progress_ns, *(worker.progress_ns for worker in self.busy_workers(beat))])
        ended_at_ns = note.get("at_ns") or self.died_at_ns
        return Observed(
            rank=member.rank,
            host=member.host,
            hostname=member.hostname,
            pid=member.pid,
            phase=note.get("phase") or beat.phase,
            step=beat.step,
            position=beat.position,
            buckets=beat.buckets,
            bucket=beat.bucket,
            silent_s=(now - progress_ns) / 1e9,
            asleep_s=(now - beat.tick_ns) / 1e9 if beat.tick_ns else 0.0,
            state=state,
            ended_s=(now - ended_at_ns) / 1e9 if ended_at_ns else None,
            ending=self.ending,
            status=note.get("status"),
            error=note.get("error"),
            orderly=note.get("orderly", False),
            symptom=note.get("symptom", False),
            peer=note.get("peer"),
            where=note.get("where") or (stacks.where(frames) if frames else None),
            waits=stacks.waits(frames or []),
            worker=note.get("worker") or self.worker_words,
        )

    def busy_workers(self, beat: Beat) -> list[Beat]:
        """Its data workers that are in the middle of a batch, while it waits for one."""
        if beat.phase not in ("data", "evaluate", "set_up"):
            return []
        return [worker for worker in self.records.workers().values() if worker.index is not None]


class Watch:
    """What this rank knows of the others, and what becomes of the run when one of them fails.

    Args:
        connect: opens a connection to the store of this attempt; None where there is none.
        timeout_s: how long a rank may keep the others waiting.
        launched: by one that the run must not outlive.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        own_stacks: stacks.Stacks,
        rank: int,
        members: Sequence[Member],
        connect: Callable[[], "Store"] | None,
        timeout_s: float,
        launched: bool = False,
    ) -> None:
        # Launchers of several hosts may count differently.
        self.attempt, self._launched = max(member.attempt for member in members), launched
        self._heartbeat, self._stacks, self._timeout_s = heartbeat, own_stacks, timeout_s
        self._rank, self._members, self._connect = rank, list(members), connect
        self._own = next(member for member in members if member.rank == rank)
        self._run_dir: Path | None = None
        self._here: dict[int, _Neighbour] = {}
        for member in members:
            if member.host == self._own.host:
                with contextlib.suppress(OSError):  # of another container: it can only be heard of
                    self._here[member.rank] = _Neighbour(member)
        self._alone = len(members) == 1
        self._reports: Reports | None = None
        self._last_resort = LastResort(timeout_s + _LAST_RESORT_S)
        self._memory_kills = processes.MemoryKills()
        self._parent, self._orphan_since = os.getppid(), 0.0
        self._named_slow: tuple[int, int] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    # ---- what the run calls

    def start(self) -> None:
        heard_by_others = len(self._here) > 1
        self._stacks.open(crashes=heard_by_others)
        self._heartbeat.tick()
        set_mine(self._heartbeat)
        self._thread.start()

    def writes_to(self, run_dir: Path) -> None:
        """Where failure.json and stacks/ belong."""
        self._run_dir = run_dir

    def close(self) -> None:
        """The run has ended well, or its end is told otherwise."""
        self._closed.set()
        self._thread.join()  # it looks at least every _TICK_S; whoever puts off must do so no more
        self._last_resort.cancel()
        self._connect = None  # a store in a file must be gone before another run meets there
        self._stacks.close()
        for neighbour in self._here.values():
            neighbour.close()

    def ended_well(self) -> None:
        self._heartbeat.note({"status": 0, "at_ns": time.monotonic_ns()})
        self.close()

    def failed(self, error: BaseException, symptom: bool) -> None:
        """Tell the others that this rank ends with `error`.

        With a `symptom`, an error that somebody else may have caused, this does not return, but for a fault
        of its own: the watch ends the process once it is known who it was.
        """
        frames = stacks.frames_of_exception(error)
        note: dict[str, Any] = {
            "status": _status(error),
            "error": _last_line(error),
            "where": stacks.where(frames),
            "orderly": isinstance(error, RunEndError),
            "symptom": symptom and not self._alone,
            "peer": getattr(error, "peer", None),
            "worker": self._worker_of_its_own(),
            "at_ns": time.monotonic_ns(),
        }
        self._heartbeat.note(note)
        if note["symptom"]:
            self._closed.wait(_GRACE_S + _ALONE_S)
        elif isinstance(error, RunEndError):
            if self._rank == 0 or self._run_dir is None or failure.read(self._run_dir) is None:
                about = self._members[error.ranks[0] if error.ranks else self._rank]
                own = self._here[self._rank].observe()  # all raise it at the same place
                own = replace(own, rank=about.rank, host=about.host, hostname=about.hostname, pid=about.pid)
                self._write(_of_one(own, _status(error), str(error)))
        elif not any(other.records.note() is None for other in self._others_here()):
            self._speak_at_exit()
        self.close()

    # ---- the thread

    def _run(self) -> None:
        poll = select.poll() if hasattr(select, "poll") else None
        for neighbour in self._others_here():
            if poll is not None and neighbour.death_fd != -1:
                poll.register(neighbour.death_fd, select.POLLIN)
        while not self._closed.is_set():
            if poll is not None:
                for fd, _ in poll.poll(_TICK_S * 1e3):
                    poll.unregister(fd)
            else:
                time.sleep(_TICK_S)
            self._heartbeat.tick()
            # Not in the set-up, where torch itself waits for peers and holds the interpreter meanwhile.
            if not self._alone and self._heartbeat.step:
                self._last_resort.put_off()
            try:
                self._look()
            except Exception as error:  # a mistake in here must not end a run that is well
                _print(f"[rank {self._rank}] the watch cannot look: {error!r}")
                time.sleep(_ALONE_S)

    def _look(self) -> None:
        self._leave_when_orphaned()
        for neighbour in self._others_here():
            neighbour.look_for_death()
        for neighbour in self._others_here():
            note = neighbour.records.note() or {}
            if "verdict" in note:
                self._leave(int(note["verdict"]))
        if self._closed.is_set() or not self._leads():
            return
        here = [neighbour.observe() for neighbour in self._here.values()]
        suspicious = any(
            rank.silent_s > _SUSPICIOUS_S or rank.status or rank.state == "dead" for rank in here
        )
        reports = self._reports_of_other_hosts()
        if reports is not None:
            reports.tell(here, eager=suspicious)
            if reports.verdict is not None:
                self._end(reports.verdict)
        if not suspicious:
            return
        if self._alone:
            self._report_a_silence(here[0])
            return
        everyone = sorted(here + (reports.others() if reports else []), key=lambda rank: rank.rank)
        if all(rank.orderly or rank.status == 0 for rank in everyone):
            return  # each by itself
        since_symptom = max((rank.ended_s or 0.0 for rank in everyone if rank.symptom), default=0.0)
        pressing = since_symptom >= _GRACE_S
        silent_s = max(rank.silent_s for rank in here)
        if (pressing or since_symptom > 1 or silent_s > 0.8 * self._timeout_s) and self._take_stacks():
            return  # look again, knowing more
        verdict = judge(everyone, self._timeout_s, pressing)
        if verdict is not None:
            self._give(verdict, everyone)
        elif found := slow(everyone, max(1.0, self._timeout_s / 10)):
            self._name_slow(found)

    def _leads(self) -> bool:
        """Whether no rank before this one of its host is awake and still taking part."""
        for rank, neighbour in sorted(self._here.items()):
            if rank == self._rank:
                return True
            beat = neighbour.records.main()
            awake = time.monotonic_ns() - beat.tick_ns < ASLEEP_S * 1e9
            note = neighbour.records.note()
            if awake and neighbour.died_at_ns is None and (note is None or note.get("symptom")):
                return False
        return True

    def _others_here(self) -> list[_Neighbour]:
        return [neighbour for rank, neighbour in self._here.items() if rank != self._rank]

    def _reports_of_other_hosts(self) -> Reports | None:
        others = [member for member in self._members if member.rank not in self._here]
        if self._reports is None and others and self._connect is not None:
            first = [
                Observed(member.rank, member.host, member.hostname, member.pid, position=-1)
                for member in others
            ]
            self._reports = Reports(self._connect, self._own.host, first)
        return self._reports

    def _take_stacks(self) -> bool:
        """Ask the ranks of this host, and their busy data workers, for their stacks; False if it was done."""
        wanted = []
        for neighbour in self._here.values():
            position = neighbour.records.main().position
            known = neighbour.frames is not None and neighbour.frames[0] == position
            if not known and neighbour.died_at_ns is None and neighbour.observe().state == "running":
                wanted.append((neighbour, position))
        if not wanted:
            return False
        texts = stacks.ask([(neighbour.member.pid, neighbour.stacks) for neighbour, _ in wanted])
        for (neighbour, position), text in zip(wanted, texts, strict=True):
            neighbour.frames = (position, stacks.frames_of(text) if text else [])
            neighbour.worker_words = _stuck_worker(neighbour, self._memory_kills)
        return True

    def _give(self, verdict: Verdict, everyone: Sequence[Observed]) -> None:
        """This host's verdict, unless another's was earlier."""
        culprit = next(rank for rank in everyone if rank.rank == verdict.ranks[0])
        ended_s = culprit.ended_s or 0.0
        if verdict.kind == "orderly" and ended_s < _ALONE_S:
            return  # all come to such an end by themselves, if they can
        prints = verdict.kind == "raised" and culprit.rank in self._here and culprit.state != "dead"
        if prints and ended_s < 1.0:
            return  # its traceback comes first
        if verdict.kind == "died" and "SIGKILL" in (culprit.ending or "SIGKILL"):
            words = self._memory_kills.words() if culprit.rank in self._here else None
            verdict = replace(verdict, message=verdict.message + (f"; {words}" if words else ""))
        if self._reports is not None:
            verdict = self._reports.agree(verdict, timeout_s=1.0)
        self._end(verdict)

    # ---- the end

    def _end(self, verdict: Verdict) -> None:
        """Say it, write it down, and leave; the ranks of this host that cannot leave are ended."""
        self._say(verdict)
        writing = threading.Thread(target=self._write, args=(verdict, True), daemon=True)
        writing.start()
        writing.join(timeout=1.0)  # the disk may hang on the host that is lost
        self._heartbeat.note({"verdict": verdict.status, "status": verdict.status})
        for neighbour in self._others_here():
            stuck = neighbour.member.rank in verdict.ranks and verdict.kind in ("stopped", "hangs")
            if neighbour.died_at_ns is None and (stuck or neighbour.observe().asleep_s > ASLEEP_S):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(neighbour.member.pid, signal.SIGKILL)
        self._leave(verdict.status)

    def _say(self, verdict: Verdict) -> None:
        if verdict.kind == "orderly":
            return
        others = len(self._members) - len(verdict.ranks)
        tail = f"\n  the other {others} ranks end, status {verdict.status}" if others > 1 else ""
        kept = f"; {self._run_dir}/failure.json and stacks/ say more" if self._run_dir is not None else ""
        _print(f"\n{verdict.message}{tail}{kept}")

    def _write(self, verdict: Verdict, with_stacks: bool = False) -> None:
        if self._run_dir is None or not self._run_dir.is_dir():
            return
        facts = {"status": verdict.status, **verdict.facts, "message": verdict.message}
        failure.write(self._run_dir, facts | {"kind": verdict.kind, "attempt": self.attempt})
        if not with_stacks:
            return
        with contextlib.suppress(OSError), (self._run_dir / "train.log").open("a") as log:
            log.write(f"{verdict.message}\n")
        folder = self._run_dir / "stacks"
        for rank, neighbour in self._here.items():
            if text := neighbour.stacks.read():
                folder.mkdir(exist_ok=True)
                (folder / f"rank{rank}.txt").write_text(text)

    def _leave(self, status: int) -> None:
        """End this process now: nothing of torch's or Python's may wait for a peer that is gone."""
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)

    def _leave_when_orphaned(self) -> None:
        """The launcher has died: the kernel has asked for a stop, which may take too long."""
        if os.getppid() == self._parent:
            return
        now = time.monotonic()
        self._orphan_since = self._orphan_since or now
        if self._launched and now - self._orphan_since > _ALONE_S - 1:
            own = self._here[self._rank].observe()
            self._write(_of_one(own, 1, "the launcher of this host died, and there was no time to save"))
            self._heartbeat.note({"verdict": 1, "status": 1})  # lest a neighbour take this for a death
            self._leave(1)

    def _speak_at_exit(self) -> None:
        """Nobody else of this host is left to speak: after the traceback, then."""
        own = replace(self._here[self._rank].observe(), symptom=False)
        verdict = judge([own], self._timeout_s, pressing=False)
        if verdict is None:
            return
        if self._reports_of_other_hosts() is not None and self._reports is not None:
            verdict = self._reports.agree(verdict, timeout_s=1.0)
        self._write(verdict, with_stacks=True)
        if not self._alone or own.worker:
            atexit.register(self._say, verdict)

    # ---- lines on the way

    def _name_slow(self, found: Observed) -> None:
        if self._named_slow != (found.rank, found.position):
            self._named_slow = (found.rank, found.position)
            others = "the others wait for it"
            at = f", at {found.where}" if found.where else ""
            _print(f"{found.name} has been in {found.doing} for {found.silent_s:.1f} s{at}; {others}")

    def _report_a_silence(self, own: Observed) -> None:
        """A single process keeps nobody waiting: say where it is, and let it go on."""
        if own.silent_s > self._timeout_s and own.status is None and self._take_stacks():
            self._name_slow(self._here[self._rank].observe())

    def _worker_of_its_own(self) -> str | None:
        own = self._here[self._rank]
        waits = own.records.main().phase in ("data", "evaluate", "set_up")
        return _stuck_worker(own, self._memory_kills) if waits else None


def _print(line: str) -> None:
    """In one piece, and past Python's own buffers and locks, which another thread may hold for ever."""
    with contextlib.suppress(OSError):  # who read it may have died
        os.write(2, f"{line}\n".encode())


def _stuck_worker(neighbour: _Neighbour, memory_kills: processes.MemoryKills) -> str | None:
    """The data worker that a rank waits for, in words: the one that is dead, or has read the longest."""
    busy = neighbour.busy_workers(neighbour.records.main())
    if not busy:
        return None
    dead = [worker for worker in busy if processes.state(worker.pid) == "dead"]
    if dead:
        how = processes.ending(dead[0].pid) or "is gone without a word"
        because = f", {words}" if (words := memory_kills.words()) else ""
        return f"its data worker {dead[0].pid} {how} while it read sample {dead[0].index}{because}"
    worker = min(busy, key=lambda beat: beat.progress_ns)
    (text,) = stacks.ask([(worker.pid, neighbour.stacks)])
    seconds = (time.monotonic_ns() - worker.progress_ns) / 1e9
    words = f"its data worker {worker.pid} has been reading sample {worker.index} for {seconds:.1f} s"
    where = stacks.where(stacks.frames_of(text, of_worker=True)) if text else None
    return f"{words}, at {where}" if where else words


def _of_one(rank: Observed, status: int, message: str) -> Verdict:
    keys = ("rank", "phase", "where", "step")
    facts = {key: value for key, value in asdict(rank).items() if key in keys}
    facts |= {"host": rank.hostname, "silent_s": 0.0}
    return Verdict((rank.rank,), "orderly", status, message, facts)


def _status(error: BaseException) -> int:
    return error.exit_code if isinstance(error, RunEndError) else 1


def _last_line(error: BaseException) -> str:
    text = str(error).strip()
    line = text.splitlines()[0] if text else ""
    return f"{type(error).__name__}: {line}"[:1000] if line else type(error).__name__
