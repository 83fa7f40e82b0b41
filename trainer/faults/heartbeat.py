"""The state of a process in memory that others of its host can read, even when it is stuck or dead.

A rank enters phases. Its data workers record the sample they read. No store takes a lock or a system call but
the clock. Times are nanoseconds of CLOCK_MONOTONIC, common to a host.
"""

import contextlib
import json
import mmap
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from operator import setitem
from typing import Any, ClassVar

from trainer.faults.processes import nameless_file, place_of

PHASES = {  # and how a verdict calls them
    "set_up": "the set-up",
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "evaluate": "the evaluation",
    "checkpoint": "the checkpoint",
    "log": "the log",
    "end": "the end",
    "fault_save": "the save at a fault",
}
ALL_REDUCE = "all_reduce"  # of one bucket, during the backward pass

MAX_WORKERS = 255  # data workers of one rank with a record; further ones have none
_MAGIC = 0x52494E47
_RECORD_BYTES, _NOTE_BYTES = 128, 8192
_NOTE = _RECORD_BYTES * (1 + MAX_WORKERS)  # where its end is recorded
_FAULT_SAVE = _NOTE + _NOTE_BYTES  # what it does to save a step at a fault
_SIZE = _FAULT_SAVE + _NOTE_BYTES
# Words of a record, int64 each: after the first those of a Beat, in its order.
_KIND, _PID, _POSITION, _PHASE, _STEP, _BUCKET, _BUCKETS, _INDEX, _PROGRESS, _TICK = range(10)
_AT_DISK, _DISK_NS, _FINISHED, _RESUMED, _DISK_PROGRESS = range(10, 15)
_PAUSE_NS = 2_000_000_000  # without a tick for longer, the process was suspended, or blocked
_NONE = -1
_NAMES = list(PHASES)


@dataclass(frozen=True)
class Beat:
    """One record as read.

    Attributes:
        position: phases entered so far. All ranks enter the same ones in the same order, so the others wait
            for the rank with the smallest.
        phase: one of PHASES.
        step: the current optimizer step, counted from 1; 0 before the first.
        bucket: the last bucket of gradients sent in this phase, if any; `buckets` counts them all.
        index: the sample being read, or the first one of the batch; None between batches.
        progress_ns: the last progress: the phase, a bucket, a sample.
        tick_ns: when the process's own watch was last awake; 0 if it has none.
        at_disk: the number of threads that wait for the disk.
        disk_ns: how long they may.
        finished: the last step whose state is whole in memory; 0 if that is not known.
        resumed_ns: when its watch was awake again after a pause; 0 if it has had none.
        disk_progress_ns: when a thread last began or ended an operation of the disk; 0 before the first. It
            is no progress of a step beside which a checkpoint is written.
    """

    pid: int
    position: int
    phase: str
    step: int
    bucket: int | None
    buckets: int
    index: int | None
    progress_ns: int
    tick_ns: int
    at_disk: int
    disk_ns: int
    finished: int
    resumed_ns: int
    disk_progress_ns: int

    PLACE: ClassVar = ("phase", "step", "position", "bucket", "buckets", "finished")


def _word(number: int) -> Any:
    """The word of a record, as an attribute."""
    return property(lambda self: self._words[number], lambda self, value: setitem(self._words, number, value))


class Heartbeat:
    """The record of this process, written by it alone, and those of its data workers.

    Attributes:
        step: the current optimizer step, counted from 1; set before the phases of a step are entered.
        finished: the last step that is finished and counted.
        fd: the memory, which has no name; another process opens it as /proc/PID/fd/FD.
    """

    step, finished = _word(_STEP), _word(_FINISHED)

    def __init__(self) -> None:
        self.fd = nameless_file("ringmaster-heartbeat")
        os.ftruncate(self.fd, _SIZE)
        self._memory = mmap.mmap(self.fd, _SIZE)
        self._num_reserved = 0
        self._counting = threading.Lock()
        self._serve(0)

    def __del__(self) -> None:
        os.close(self.fd)

    def _serve(self, slot: int) -> None:
        self._words = _words(self._memory, slot)
        self._words[_PID] = os.getpid()
        self._words[_PROGRESS] = time.monotonic_ns()
        self._words[_BUCKET] = self._words[_INDEX] = _NONE
        self._words[_KIND] = _MAGIC

    def enter(self, phase: str, bucket: int = _NONE) -> None:
        """Record that this process begins `phase`, one of PHASES; or sends `bucket` to the all-reduce."""
        words = self._words
        words[_PROGRESS] = time.monotonic_ns()
        if phase == ALL_REDUCE:
            words[_BUCKET] = bucket
            words[_BUCKETS] += 1
            return
        words[_PHASE] = _NAMES.index(phase)
        words[_BUCKET] = _NONE
        words[_POSITION] += 1

    def skip(self, phases: tuple[str, ...], times: int) -> None:
        """Pass phases that others enter `times` times, so that this rank, without work, is not behind."""
        for phase in phases * times:
            self.enter(phase)

    def read(self, index: int) -> None:
        """Record that this process begins to read sample `index`."""
        self._words[_INDEX] = index
        self._words[_PROGRESS] = time.monotonic_ns()

    def rest(self) -> None:
        """Record that a data worker's batch is complete."""
        self._words[_INDEX] = _NONE
        self._words[_PROGRESS] = time.monotonic_ns()

    def reserve(self, num_workers: int) -> int:
        """Reserve records for data workers that are forked later; return the number of the first."""
        first = self._num_reserved + 1
        self._num_reserved += num_workers
        return first

    def become_worker(self, number: int) -> None:
        """Called in a data worker: from now on this object writes the record `number`."""
        if number <= MAX_WORKERS:
            self._serve(number)
            self._words[_PHASE] = _NAMES.index("data")
        else:
            self._words = memoryview(bytearray(_RECORD_BYTES)).cast("q")

    def progress(self) -> None:
        """Record progress within a phase that may take long, such as a written part of a file."""
        self._words[_PROGRESS] = time.monotonic_ns()

    def disk_may_take(self, seconds: float) -> None:
        """Allow this much silence within `at_disk`."""
        self._words[_DISK_NS] = int(seconds * 1e9)

    @contextlib.contextmanager
    def at_disk(self) -> Iterator[None]:
        """Around a disk operation that may take long without progress, such as fsync, in any thread."""
        self._count_at_disk(1)
        try:
            yield
        finally:
            self._count_at_disk(-1)

    def _count_at_disk(self, change: int) -> None:
        with self._counting:
            self._words[_AT_DISK] += change
            self._words[_DISK_PROGRESS] = time.monotonic_ns()

    def tick(self) -> None:
        now, words = time.monotonic_ns(), self._words
        if words[_TICK] and now - words[_TICK] > _PAUSE_NS:
            words[_RESUMED] = now
        words[_TICK] = now

    def note(self, facts: dict[str, Any]) -> None:
        """Record how this process ends (plain values), for others to read afterwards."""
        self._write(_NOTE, facts)

    def note_fault_save(self, facts: dict[str, Any]) -> None:
        """Record what this process asks for or does to save a step at a fault (plain values)."""
        self._write(_FAULT_SAVE, facts)

    def _write(self, begin: int, facts: dict[str, Any]) -> None:
        text = json.dumps(facts, ensure_ascii=False).encode(errors="surrogatepass")
        self._memory[begin : begin + 8] = bytes(8)
        assert len(text) <= _NOTE_BYTES - 8, "the note is too long"
        self._memory[begin + 8 : begin + 8 + len(text)] = text
        self._memory[begin : begin + 8] = len(text).to_bytes(8, "little")  # last: a note is whole or absent


class Records:
    """A heartbeat as another process (or this one) reads it."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def of(cls, pid: int, fd: int) -> "Records":
        """Open the records of another process of this host.

        Raises:
            OSError: it is gone, or of another host, container or user.
        """
        with open(place_of(pid, fd), "rb") as file:  # noqa: PTH123, a handle, not a path
            if os.fstat(file.fileno()).st_size != _SIZE:
                raise OSError(f"process {pid} has no heartbeat")
            memory = mmap.mmap(file.fileno(), _SIZE, prot=mmap.PROT_READ)
        records = cls(memory)
        if records.main().pid != pid:
            raise OSError(f"the heartbeat of process {pid} is another process's")
        return records

    def main(self) -> Beat:
        return _beat(_words(self._memory, 0))

    def workers(self) -> dict[int, Beat]:
        """The records of the data workers that have started, by number."""
        words = memoryview(self._memory)[: _RECORD_BYTES * (1 + MAX_WORKERS)].cast("q")
        kinds = words[_KIND :: _RECORD_BYTES // 8].tolist()  # in one read: a watch asks five times a second
        begun = [number for number, kind in enumerate(kinds) if number and kind == _MAGIC]
        return {number: _beat(_words(self._memory, number)) for number in begun}

    def note(self) -> dict[str, Any] | None:
        """The recorded end of the process; None without one."""
        return self._read(_NOTE)

    def fault_save(self) -> dict[str, Any]:
        """What it asked for or did to save a step at a fault; empty without a fault."""
        return self._read(_FAULT_SAVE) or {}

    def _read(self, begin: int) -> dict[str, Any] | None:
        size = int.from_bytes(self._memory[begin : begin + 8], "little")
        with contextlib.suppress(ValueError):  # one that is being replaced is absent for a moment
            return json.loads(self._memory[begin + 8 : begin + 8 + size]) if size else None
        return None


def _words(memory: mmap.mmap, slot: int) -> memoryview:
    return memoryview(memory)[slot * _RECORD_BYTES : (slot + 1) * _RECORD_BYTES].cast("q")


def _beat(words: memoryview) -> Beat:
    values: list[Any] = words[_PID : _DISK_PROGRESS + 1].tolist()
    values[_PHASE - 1] = _NAMES[values[_PHASE - 1]]
    for word in (_BUCKET, _INDEX):
        values[word - 1] = None if values[word - 1] == _NONE else values[word - 1]
    return Beat(*values)


_of_this_process: Heartbeat | None = None


def set_mine(heartbeat: Heartbeat) -> None:
    """Make `heartbeat` the one of code that reads or writes files, and does not know it: see below."""
    global _of_this_process
    _of_this_process = heartbeat


def progress() -> None:
    """As `Heartbeat.progress`, for that code."""
    if _of_this_process is not None:
        _of_this_process.progress()


@contextlib.contextmanager
def at_disk() -> Iterator[None]:
    """As `Heartbeat.at_disk`, for that code."""
    with contextlib.nullcontext() if _of_this_process is None else _of_this_process.at_disk():
        yield
