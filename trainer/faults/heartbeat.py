"""What a process is doing, in memory that others of its host can read: when it is stuck, and when it is dead.

A rank enters phases, its data workers note the sample they read. All of it is plain stores into a small
shared record: no lock, no system call but for the clock, a microsecond a phase. Times are nanoseconds
of CLOCK_MONOTONIC, which all processes of a host share.
"""

import contextlib
import json
import mmap
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PHASES = (
    "set_up",
    "data",
    "forward",
    "backward",
    "optimizer",
    "evaluate",
    "checkpoint",
    "log",
    "end",
)
ALL_REDUCE = "all_reduce"  # of one bucket, while the backward pass goes on

MAX_WORKERS = 255  # data workers of one rank that have a record; any others work without
_MAGIC = 0x52494E47
_RECORD_BYTES, _NOTE_BYTES = 128, 8192
_SIZE = _RECORD_BYTES * (1 + MAX_WORKERS) + _NOTE_BYTES
# Words of a record, int64 each.
_KIND, _PID, _POSITION, _PHASE, _STEP, _SINCE, _BUCKET, _BUCKETS, _INDEX, _PROGRESS, _TICK = range(11)
_AT_DISK, _DISK_NS = range(11, 13)
_NONE = -1
_CODES = {phase: code for code, phase in enumerate(PHASES)}


@dataclass(frozen=True)
class Beat:
    """One record as it was read.

    Attributes:
        position: phases entered so far. All ranks enter the same ones in the same order, so that the rank
            with the smallest is the one that the others wait for.
        step: the optimizer step being made, counted from 1; 0 before the first.
        since_ns: when this phase was entered.
        bucket: the bucket of gradients handed over last in this phase, if any; `buckets` counts them all.
        index: the sample being read, or the first one of the batch; None between batches.
        progress_ns: the last sign of progress: the phase, a bucket, a sample, bytes of a checkpoint.
        tick_ns: when the process's own watch was last awake; 0 if it has none.
        disk_ns: how long the disk may take over what some thread waits for it with; 0 where none does.
    """

    pid: int
    position: int
    phase: str
    step: int
    since_ns: int
    bucket: int | None
    buckets: int
    index: int | None
    progress_ns: int
    tick_ns: int
    disk_ns: int


class Heartbeat:
    """The record of this process, to be written by it alone, and those of its data workers.

    Attributes:
        fd: the memory; another process opens it as /proc/PID/fd/FD. -1 where the system has none to share.
    """

    def __init__(self) -> None:
        self.fd = -1
        if hasattr(os, "memfd_create"):  # Linux; without a name, so nothing is left behind
            self.fd = os.memfd_create("ringmaster-heartbeat")
            os.ftruncate(self.fd, _SIZE)
        self._memory = mmap.mmap(self.fd, _SIZE)
        self._num_reserved = 0
        self._counting = threading.Lock()
        self._ordered = True
        self._serve(0)

    def __del__(self) -> None:
        if self.fd != -1:
            os.close(self.fd)

    def _serve(self, slot: int) -> None:
        self._words = _words(self._memory, slot)
        self._words[_PID] = os.getpid()
        self._words[_SINCE] = self._words[_PROGRESS] = time.monotonic_ns()
        self._words[_BUCKET] = self._words[_INDEX] = _NONE
        self._words[_KIND] = _MAGIC

    @property
    def step(self) -> int:
        """The optimizer step being made, counted from 1; set before the phases of a step are entered."""
        return self._words[_STEP]

    @step.setter
    def step(self, step: int) -> None:
        self._words[_STEP] = step

    def enter(self, phase: str, bucket: int = _NONE) -> None:
        """This process begins with `phase`, one of PHASES; or hands `bucket` over to be all-reduced."""
        words, now = self._words, time.monotonic_ns()
        words[_PROGRESS] = now
        if phase == ALL_REDUCE:
            words[_BUCKET] = bucket
            words[_BUCKETS] += self._ordered
            return
        words[_PHASE] = _CODES[phase]
        words[_SINCE] = now
        words[_BUCKET] = _NONE
        words[_POSITION] += self._ordered

    @contextlib.contextmanager
    def in_any_order(self) -> Iterator[None]:
        """Within it each rank goes through phases as often as it can; who has made fewer is not behind."""
        self._ordered = False
        try:
            yield
        finally:
            self._ordered = True

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """Around a wait for those that are not so far, within `in_any_order`; also when that has failed."""
        self._words[_POSITION] += 1
        yield
        self._words[_POSITION] -= 1

    def skip(self, phases: tuple[str, ...], times: int) -> None:
        """Pass through phases that others enter so often, with nothing to do: nobody waits for this one."""
        for phase in phases * times:
            self.enter(phase)

    def read(self, index: int) -> None:
        """This process begins to read sample `index`."""
        words = self._words
        words[_INDEX] = index
        words[_SINCE] = words[_PROGRESS] = time.monotonic_ns()

    def rest(self) -> None:
        """A data worker's batch is read."""
        self._words[_INDEX] = _NONE
        self._words[_PROGRESS] = time.monotonic_ns()

    def reserve(self, num_workers: int) -> int:
        """Records for so many data workers, which are forked later: the number of the first."""
        first = self._num_reserved + 1
        self._num_reserved += num_workers
        return first

    def become_worker(self, number: int) -> None:
        """To be called in a data worker: from now on this object writes the record `number`."""
        if number <= MAX_WORKERS:
            self._serve(number)
            self._words[_PHASE] = _CODES["data"]
        else:
            self._words = memoryview(bytearray(_RECORD_BYTES)).cast("q")

    def progress(self) -> None:
        """A sign of life within a phase that may take long: a piece of a file has been written, say."""
        self._words[_PROGRESS] = time.monotonic_ns()

    def disk_may_take(self, seconds: float) -> None:
        """Whoever is within `at_disk` may be silent for so long."""
        self._words[_DISK_NS] = int(seconds * 1e9)

    @contextlib.contextmanager
    def at_disk(self) -> Iterator[None]:
        """Around what the disk may hold for long, an fsync say, in any thread, without a sign of life."""
        self._count_at_disk(1)
        try:
            yield
        finally:
            self._count_at_disk(-1)

    def _count_at_disk(self, change: int) -> None:
        with self._counting:
            self._words[_AT_DISK] += change
            self.progress()

    def tick(self) -> None:
        self._words[_TICK] = time.monotonic_ns()

    def note(self, facts: dict[str, Any]) -> None:
        """Leave word of how this process ends (plain values), to be read when it is gone."""
        text = json.dumps(facts, ensure_ascii=False).encode(errors="surrogatepass")
        begin = _SIZE - _NOTE_BYTES
        self._memory[begin : begin + 8] = bytes(8)
        assert len(text) <= _NOTE_BYTES - 8, "a note this long is no note"
        self._memory[begin + 8 : begin + 8 + len(text)] = text
        self._memory[begin : begin + 8] = len(text).to_bytes(8, "little")  # last: whole or not there

    def records(self) -> "Records":
        return Records(self._memory)


_of_this_process: Heartbeat | None = None


def set_mine(heartbeat: Heartbeat) -> None:
    """Make `heartbeat` the one of which `progress` tells."""
    global _of_this_process
    _of_this_process = heartbeat


def progress() -> None:
    """Called where files are written piece by piece, far from anybody who knows of heartbeats."""
    if _of_this_process is not None:
        _of_this_process.progress()


@contextlib.contextmanager
def at_disk() -> Iterator[None]:
    """As Heartbeat.at_disk, likewise."""
    with contextlib.nullcontext() if _of_this_process is None else _of_this_process.at_disk():
        yield


class Records:
    """What another process (or this one) reads of a heartbeat."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def of(cls, pid: int, fd: int) -> "Records":
        """Open those of another process of this host.

        Raises:
            OSError: it is gone, or of another host, container or user.
        """
        with open(f"/proc/{pid}/fd/{fd}", "rb") as file:  # noqa: PTH123, no path but a handle
            if os.fstat(file.fileno()).st_size != _SIZE:
                raise OSError(f"process {pid} has no heartbeat")
            memory = mmap.mmap(file.fileno(), _SIZE, prot=mmap.PROT_READ)
        records = cls(memory)
        if records.main().pid != pid:
            raise OSError(f"the heartbeat of process {pid} is another's")
        return records

    def main(self) -> Beat:
        return _beat(_words(self._memory, 0))

    def workers(self) -> dict[int, Beat]:
        """Those of the data workers that have begun, by number."""
        words = memoryview(self._memory)[: _RECORD_BYTES * (1 + MAX_WORKERS)].cast("q")
        kinds = words[_KIND :: _RECORD_BYTES // 8].tolist()  # at once: a watch asks five times a second
        begun = [number for number, kind in enumerate(kinds) if number and kind == _MAGIC]
        return {number: _beat(_words(self._memory, number)) for number in begun}

    def note(self) -> dict[str, Any] | None:
        """How the process said it ends; None if it did not."""
        begin = _SIZE - _NOTE_BYTES
        size = int.from_bytes(self._memory[begin : begin + 8], "little")
        with contextlib.suppress(ValueError):  # one that is being replaced is not there for a moment
            return json.loads(self._memory[begin + 8 : begin + 8 + size]) if size else None
        return None


def _words(memory: mmap.mmap, slot: int) -> memoryview:
    return memoryview(memory)[slot * _RECORD_BYTES : (slot + 1) * _RECORD_BYTES].cast("q")


def _beat(words: memoryview) -> Beat:
    return Beat(
        pid=words[_PID],
        position=words[_POSITION],
        phase=PHASES[words[_PHASE]],
        step=words[_STEP],
        since_ns=words[_SINCE],
        bucket=words[_BUCKET] if words[_BUCKET] != _NONE else None,
        buckets=words[_BUCKETS],
        index=words[_INDEX] if words[_INDEX] != _NONE else None,
        progress_ns=words[_PROGRESS],
        tick_ns=words[_TICK],
        disk_ns=words[_DISK_NS] if words[_AT_DISK] else 0,
    )
