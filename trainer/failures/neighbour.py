"""Observe a rank on this host from outside, even after its death."""

import contextlib
import os
import re
import select
import signal
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trainer.failures import processes, stacks
from trainer.failures.diagnosis import Observed
from trainer.failures.heartbeat import Beat, Heartbeat, Records

TICK_S = 0.2  # the longest interval between two checks by a rank's watch
_MAY_READ = ("data", "evaluate", "set_up")  # phases in which a rank waits for its data workers
_MAY_WRITE = ("checkpoint", "end")  # phases in which a rank waits for the disk; other writes are asynchronous


@dataclass(frozen=True)
class RankIdentity:
    """The identity of a rank, which it sends to the other ranks at the start."""

    rank: int
    host: int
    hostname: str
    pid: int
    heartbeat_fd: int
    stacks_fd: int
    attempt: int  # the number of restarts, from its launcher
    address: str | None = None  # the address of its host on the route to the store
    error_file: str | None = None  # the file in which torchrun expects its error
    rendezvous_port: int = 0  # the port for the rendezvous of survivors, if this is the lowest survivor


def introduction(rank: int, heartbeat: Heartbeat, own_stacks: stacks.Stacks) -> dict[str, Any]:
    """Return this rank's `RankIdentity` as a dict, without its host, which the rendezvous determines."""
    return {
        "rank": rank,
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "heartbeat_fd": heartbeat.fd,
        "stacks_fd": own_stacks.fd,
        "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
        "error_file": os.environ.get("TORCHELASTIC_ERROR_FILE"),
    }


class Neighbour:
    """A rank on this host (possibly this rank), observed through its shared memory and its process.

    Raises:
        OSError: the process has ended, or belongs to another container or user.
    """

    def __init__(self, member: RankIdentity) -> None:
        self.member = member
        self.records = Records.of(member.pid, member.heartbeat_fd)
        self.stacks = stacks.StackReader(member.pid, member.stacks_fd)
        self.death_fd = processes.watch_for_death(member.pid)
        self.died_at_ns: int | None = None
        self.death: str | None = None  # how it died, if observed
        self.frames: tuple[int, list[stacks.Frame]] | None = None  # its position, and the frames there
        self.frames_at_s = 0.0  # the time at which the frames were read
        self.frames_since_s = 0.0  # the time since which the frames have been the same
        self.worker_state: str | None = None
        self._poll = select.poll()
        if self.death_fd != -1:
            self._poll.register(self.death_fd, select.POLLIN)

    def close(self) -> None:
        self.stacks.close()
        if self.death_fd != -1:
            os.close(self.death_fd)

    def look_for_death(self) -> bool:
        """Return whether the rank is dead; if so, record when and how it died."""
        is_alive = self.death_fd != -1 and not self._poll.poll(0)
        if not is_alive and self.died_at_ns is None and processes.state(self.member.pid) == "dead":
            self.died_at_ns = time.monotonic_ns()
            self.death = processes.death_of(self.member.pid)
        return self.died_at_ns is not None

    def observe(self, since_ns: int = 0) -> Observed:
        """Return an observation of the rank.

        Args:
            since_ns: the time at which all ranks on this host were awake again after a suspension. Time
                before that does not count as silence.
        """
        beat, note, now = self.records.main(), self.records.notes(), time.monotonic_ns()
        member, frames = self.member, None
        if self.frames is not None and self.frames[0] == beat.position:
            frames = self.frames[1]
        state = "running"
        if self.died_at_ns is not None:
            state = "dead"
            _, crash, text = self.stacks.read().rpartition("Fatal Python")
            frames = stacks.frames_of(text) if crash else None
        elif now - beat.tick_ns > 2e9 * TICK_S:
            state = processes.state(member.pid)
        waits_for_disk = beat.phase in _MAY_WRITE
        progress_ns = max(
            beat.progress_ns,
            beat.disk_progress_ns if waits_for_disk or beat.phase == "save_on_failure" else 0,
            *(worker.progress_ns for worker in self.busy_workers(beat)),
            since_ns,
        )
        waits = stacks.waits(frames or [])
        ended_at_ns = note.get("at_ns") or self.died_at_ns
        facts: dict[str, Any] = {name: getattr(member, name) for name in ("rank", "host", "hostname", "pid")}
        facts |= {name: getattr(beat, name) for name in Beat.OBSERVED}
        facts |= {name: note[name] for name in ("status", "error", "orderly", "symptom") if name in note}
        return Observed(
            **facts,
            silent_s=(now - progress_ns) / 1e9,
            asleep_s=(now - max(beat.tick_ns, since_ns)) / 1e9 if beat.tick_ns else 0.0,
            state=state,
            ended_s=(now - ended_at_ns) / 1e9 if ended_at_ns else None,
            death=self.death,
            where=note.get("where") or (stacks.where(frames) if frames else None),
            waits=waits,
            waited_s=now / 1e9 - self.frames_since_s if waits else 0.0,
            worker=note.get("worker") or self.worker_state,
            patience_s=beat.disk_ns / 1e9 if beat.at_disk and waits_for_disk else 0.0,
        )

    def busy_workers(self, beat: Beat, error: str = "") -> list[Beat]:
        """Return the data workers that are in the middle of a batch.

        Outside the phases that wait for data workers, return only workers whose pids are in `error`.
        """
        if beat.phase not in _MAY_READ and not error:
            return []
        busy = [worker for worker in self.records.workers().values() if worker.index is not None]
        if beat.phase in _MAY_READ:
            return busy
        return [worker for worker in busy if str(worker.pid) in re.findall(r"\d+", error)]

    def stuck_worker(self, error: str = "") -> str | None:
        """Describe the data worker that this rank waits for: a dead worker, or else the slowest worker.

        torch raises an error about a dead worker in any phase; `error` then contains its pid.
        """
        busy = self.busy_workers(self.records.main(), error)
        if not busy:
            return None
        dead = [worker for worker in busy if processes.state(worker.pid) == "dead"]
        if dead:
            how = processes.death_of(dead[0].pid) or "died without a message"
            return f"its data worker {dead[0].pid} {how} while it read sample {dead[0].index}"
        worker = min(busy, key=lambda beat: beat.progress_ns)
        (text,) = stacks.ask([(worker.pid, self.stacks)])
        seconds = (time.monotonic_ns() - worker.progress_ns) / 1e9
        state = f"its data worker {worker.pid} has been reading sample {worker.index} for {seconds:.1f} s"
        where = stacks.where(stacks.frames_of(text, of_worker=True)) if text else None
        return f"{state}, at {where}" if where else state

    def end_workers(self, idle: bool) -> None:
        """After a failure, kill the data workers that are reading a batch; with `idle`, kill all of them.

        If they lived, this process would wait at its exit for workers that may never end, even after a
        SIGTERM. In a process that continues, the garbage collector would wait 5 s for each worker.
        """
        with contextlib.suppress(ValueError):  # not in the main thread, so torch's handler stays
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for worker in self.records.workers().values():
            if (idle or worker.index is not None) and processes.parent(worker.pid) == self.member.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)


def take_stacks(neighbours: Iterable[Neighbour], fresh_s: float) -> bool:
    """Read the stacks of ranks and of their busy data workers, unless all stacks are newer than `fresh_s`.

    Returns:
        Whether stacks were read.
    """
    wanted = []
    for neighbour in neighbours:
        position = neighbour.records.main().position
        # Frames also age within a phase, because a phase such as the set-up may take a long time.
        is_fresh = time.monotonic() - neighbour.frames_at_s < fresh_s
        is_current = is_fresh and neighbour.frames is not None and neighbour.frames[0] == position
        if not is_current and neighbour.died_at_ns is None and neighbour.observe().state == "running":
            wanted.append((neighbour, position))
    if not wanted:
        return False
    texts = stacks.ask([(neighbour.member.pid, neighbour.stacks) for neighbour, _ in wanted])
    for (neighbour, position), text in zip(wanted, texts, strict=True):
        before, neighbour.frames_at_s = neighbour.frames, time.monotonic()
        neighbour.frames = (position, stacks.frames_of(text) if text else [])
        if neighbour.frames != before:
            neighbour.frames_since_s = neighbour.frames_at_s
        neighbour.worker_state = neighbour.stuck_worker()
    return True
