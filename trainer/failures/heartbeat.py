"""The state of a process in memory that others of its host can read, even when it is stuck or dead.

A rank enters phases. Its data workers record the sample they read. No store takes a lock or a system call but
the clock. Times are nanoseconds of CLOCK_MONOTONIC, common to a host.
"""

import contextlib
import ctypes
import json
import mmap
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from trainer.failures.processes import nameless_file, place_of

PHASES = {  # and how a failure calls them
    "set_up": "the set-up",
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "evaluate": "the evaluation",
    "checkpoint": "the checkpoint",
    "log": "the log",
    "end": "the end",
    "save_on_failure": "the save at a fault",
}
ALL_REDUCE = "all_reduce"  # of one bucket, during the backward pass

MAX_WORKERS = 255  # data workers of one rank with a record; further ones have none
_PAUSE_NS = 2_000_000_000  # without a tick for longer, the process was suspended, or blocked
_NONE = -1
_NAMES = list(PHASES)


class Beat(ctypes.Structure):
    """One record, of whole numbers.

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
        num_workers: the data workers that may have a record.
        note_bytes: the length of all notes.
    """

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("pid", "position", "_phase", "step", "_bucket", "buckets", "_index", "progress_ns"),
            *("tick_ns", "at_disk", "disk_ns", "finished", "resumed_ns", "disk_progress_ns", "num_workers"),
            "note_bytes",
        )
    )
    PLACE = ("phase", "step", "position", "bucket", "buckets", "finished")

    @property
    def phase(self) -> str:
        return _NAMES[self._phase]

    @property
    def bucket(self) -> int | None:
        return None if self._bucket == _NONE else self._bucket

    @property
    def index(self) -> int | None:
        return None if self._index == _NONE else self._index


_RECORD_BYTES = ctypes.sizeof(Beat)
_NOTES = _RECORD_BYTES * (1 + MAX_WORKERS)  # where they begin
_SIZE = _NOTES + 16384


def _number(name: str) -> Any:
    """A number of this process's record, as an attribute."""
    return property(lambda self: getattr(self._own, name), lambda self, new: setattr(self._own, name, new))


class Heartbeat:
    """The record of this process, written by it alone, and those of its data workers.

    Attributes:
        step: the current optimizer step, counted from 1; set before the phases of a step are entered.
        finished: the last step that is finished and counted.
        fd: the memory, which has no name; another process opens it as /proc/PID/fd/FD.
    """

    step, finished = _number("step"), _number("finished")

    def __init__(self) -> None:
        self.fd = nameless_file("ringmaster-heartbeat")
        os.ftruncate(self.fd, _SIZE)
        self._memory = mmap.mmap(self.fd, _SIZE)
        self._lock = threading.Lock()
        self._serve(0)

    def __del__(self) -> None:
        os.close(self.fd)

    def _serve(self, slot: int) -> None:
        self._own = Beat.from_buffer(self._memory, slot * _RECORD_BYTES)
        self._own._bucket = self._own._index = _NONE
        self.beat()
        self._own.pid = os.getpid()

    def enter(self, phase: str, bucket: int = _NONE) -> None:
        """Record that this process begins `phase`, one of PHASES; or sends `bucket` to the all-reduce."""
        own = self._own
        own.progress_ns = time.monotonic_ns()
        own._bucket = bucket
        if phase == ALL_REDUCE:
            own.buckets += 1
        else:
            own._phase = _NAMES.index(phase)
            own.position += 1

    def skip(self, phases: tuple[str, ...], times: int) -> None:
        """Pass phases that others enter `times` times, so that this rank, without work, is not behind."""
        for phase in phases * times:
            self.enter(phase)

    def read(self, index: int) -> None:
        """Record that this process begins to read sample `index`."""
        self._own._index = index
        self.beat()

    def rest(self) -> None:
        """Record that a data worker's batch is complete."""
        self.read(_NONE)

    def reserve(self, num_workers: int) -> int:
        """Reserve records for data workers that are forked later; return the number of the first."""
        self._own.num_workers += num_workers
        return int(self._own.num_workers) - num_workers + 1

    def become_worker(self, number: int) -> None:
        """Called in a data worker: from now on this object writes the record `number`."""
        if number <= MAX_WORKERS:
            self._serve(number)
            self._own._phase = _NAMES.index("data")
        else:
            self._own = Beat()

    def beat(self) -> None:
        """Record progress within a phase that may take long, such as a written part of a file."""
        self._own.progress_ns = time.monotonic_ns()

    def disk_may_take(self, seconds: float) -> None:
        """Allow this much silence within `at_disk`."""
        self._own.disk_ns = int(seconds * 1e9)

    @contextlib.contextmanager
    def at_disk(self) -> Iterator[None]:
        """Around a disk operation that may take long without progress, such as fsync, in any thread."""
        self._count_at_disk(1)
        try:
            yield
        finally:
            self._count_at_disk(-1)

    def _count_at_disk(self, change: int) -> None:
        with self._lock:
            self._own.at_disk += change
            self._own.disk_progress_ns = time.monotonic_ns()

    def tick(self) -> None:
        now, own = time.monotonic_ns(), self._own
        if own.tick_ns and now - own.tick_ns > _PAUSE_NS:
            own.resumed_ns = now
        own.tick_ns = now

    def note(self, **facts: Any) -> None:
        """Add plain values to what others can read: how this process ends, or how it saves a step then."""
        text = json.dumps(facts, ensure_ascii=False).encode(errors="surrogatepass") + b"\n"
        with self._lock:
            begin = _NOTES + self._own.note_bytes
            assert begin + len(text) <= _SIZE, "the notes are too long"
            self._memory[begin : begin + len(text)] = text
            self._own.note_bytes += len(text)  # last: a note is whole or absent


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
        return self._record(0)

    def workers(self) -> dict[int, Beat]:
        """The records of the data workers that have started, by number."""
        numbers = range(1, 1 + min(self.main().num_workers, MAX_WORKERS))
        return {number: beat for number in numbers if (beat := self._record(number)).pid}

    def _record(self, number: int) -> Beat:
        return Beat.from_buffer_copy(self._memory, number * _RECORD_BYTES)

    def notes(self) -> dict[str, Any]:
        """What the process has noted; with a `status` once it ends."""
        lines = self._memory[_NOTES : _NOTES + self.main().note_bytes].splitlines()
        return {name: value for line in lines for name, value in json.loads(line).items()}


_of_this_process: Heartbeat | None = None


def set_mine(heartbeat: Heartbeat) -> None:
    """Make `heartbeat` the one of code that reads or writes files, and does not know it: see below."""
    global _of_this_process
    _of_this_process = heartbeat


def beat() -> None:
    """As `Heartbeat.beat`, for that code."""
    if _of_this_process is not None:
        _of_this_process.beat()


@contextlib.contextmanager
def at_disk() -> Iterator[None]:
    """As `Heartbeat.at_disk`, for that code."""
    with contextlib.nullcontext() if _of_this_process is None else _of_this_process.at_disk():
        yield
