"""The heartbeat: a process's state in memory that other processes on its host can read at any time.

A rank records the phases that it enters, and its data workers record the samples that they read. Recording
needs no lock, and no system call other than reading the clock. Times are in nanoseconds of CLOCK_MONOTONIC,
which all processes on a host share.
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

from trainer.failures.processes import nameless_file, path_of_fd

PHASES = {  # name -> its description in messages
    "set_up": "the set-up",
    "data": "the data loading",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer update",
    "evaluate": "the evaluation",
    "checkpoint": "the checkpointing",
    "log": "the logging",
    "end": "the work at the end of the run",
    "save_on_failure": "the save on failure",
}
ALL_REDUCE = "all_reduce"  # of one bucket, during the backward pass

MAX_WORKERS = 255  # the largest number of data workers of a rank that can have a record
_PAUSE_NS = 2_000_000_000  # a process without a tick for longer was suspended or blocked
_NONE = -1
_NAMES = list(PHASES)


class Beat(ctypes.Structure):
    """The record of a rank or a data worker; all fields are integers.

    Attributes:
        position: the number of phases entered so far. All ranks enter the same phases in the same order, so
            the other ranks wait for the rank with the smallest position.
        phase: one of PHASES.
        step: the current optimizer step, counted from 1; 0 before the first.
        bucket: the last bucket of gradients sent in this phase, if any; `buckets` counts all buckets.
        index: the index of the sample being read, or of the first sample of the batch; None between batches.
        progress_ns: the time of the last progress: a phase, a bucket or a sample.
        tick_ns: the time at which the watch of the process was last awake; 0 without a watch.
        at_disk: the number of threads that are waiting for the disk.
        disk_ns: the longest time for which they may wait.
        finished: the last step whose state is complete in memory; 0 if unknown.
        resumed_ns: the time at which the watch woke up after a pause; 0 if there was none.
        disk_progress_ns: the time at which a thread last started or ended a disk operation; 0 before the
            first. It is separate, because an asynchronous save is not progress of the current step.
        num_workers: the number of data workers that may have a record.
        note_bytes: the total length of the notes.
    """

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("pid", "position", "_phase", "step", "_bucket", "buckets", "_index", "progress_ns"),
            *("tick_ns", "at_disk", "disk_ns", "finished", "resumed_ns", "disk_progress_ns", "num_workers"),
            "note_bytes",
        )
    )
    OBSERVED = ("phase", "step", "position", "bucket", "buckets", "finished")

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
_NOTES = _RECORD_BYTES * (1 + MAX_WORKERS)  # offset of the notes
_SIZE = _NOTES + 16384


def _number(name: str) -> Any:
    return property(lambda self: getattr(self._own, name), lambda self, new: setattr(self._own, name, new))


class Heartbeat:
    """The heartbeats of this process (written only by this process) and of its data workers.

    Attributes:
        step: the current optimizer step, counted from 1; set it before entering the phases of a step.
        finished: the last step that is finished and included in the progress of the run.
        fd: the file descriptor of the memory, which other processes open as /proc/PID/fd/FD.
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
        """Record that this process starts `phase`, one of PHASES, or sends `bucket` to the all-reduce."""
        own = self._own
        own.progress_ns = time.monotonic_ns()
        own._bucket = bucket
        if phase == ALL_REDUCE:
            own.buckets += 1
        else:
            own._phase = _NAMES.index(phase)
            own.position += 1

    def skip(self, phases: tuple[str, ...], times: int) -> None:
        """Enter `phases` `times` times, so that a rank with less work does not seem to be behind."""
        for phase in phases * times:
            self.enter(phase)

    def read(self, index: int) -> None:
        self._own._index = index
        self.beat()

    def rest(self) -> None:
        """Record that this data worker's batch is complete."""
        self.read(_NONE)

    def reserve(self, num_workers: int) -> int:
        """Reserve records for data workers that will be forked; return the number of the first record."""
        self._own.num_workers += num_workers
        return int(self._own.num_workers) - num_workers + 1

    def become_worker(self, number: int) -> None:
        """Make this object, in a data worker, write the record `number`."""
        if number <= MAX_WORKERS:
            self._serve(number)
            self._own._phase = _NAMES.index("data")
        else:
            self._own = Beat()

    def beat(self) -> None:
        """Record progress within a phase that may take a long time, such as each part of a file written."""
        self._own.progress_ns = time.monotonic_ns()

    def disk_may_take(self, seconds: float) -> None:
        """Set the longest time without progress that is allowed within `at_disk`."""
        self._own.disk_ns = int(seconds * 1e9)

    @contextlib.contextmanager
    def at_disk(self) -> Iterator[None]:
        """Mark a disk operation, in any thread, that may take long without progress, such as fsync."""
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
        """Add plain values that other processes can read, such as the status with which this process ends."""
        text = json.dumps(facts, ensure_ascii=False).encode(errors="surrogatepass") + b"\n"
        with self._lock:
            begin = _NOTES + self._own.note_bytes
            assert begin + len(text) <= _SIZE, "the notes are too long"
            self._memory[begin : begin + len(text)] = text
            self._own.note_bytes += len(text)  # last, so that readers see complete notes only


class Records:
    """Read access to the heartbeat of another process, or of this one."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def of(cls, pid: int, fd: int) -> "Records":
        """Open the records of another process on this host.

        Raises:
            OSError: the process has ended, or belongs to another host, container or user.
        """
        with open(path_of_fd(pid, fd), "rb") as file:  # noqa: PTH123, a handle, not a path
            if os.fstat(file.fileno()).st_size != _SIZE:
                raise OSError(f"process {pid} has no heartbeat")
            memory = mmap.mmap(file.fileno(), _SIZE, prot=mmap.PROT_READ)
        records = cls(memory)
        if records.main().pid != pid:
            raise OSError(f"the heartbeat of process {pid} belongs to another process")
        return records

    def main(self) -> Beat:
        return self._record(0)

    def workers(self) -> dict[int, Beat]:
        """Return the records of the data workers that have started, by number."""
        numbers = range(1, 1 + min(self.main().num_workers, MAX_WORKERS))
        return {number: beat for number in numbers if (beat := self._record(number)).pid}

    def _record(self, number: int) -> Beat:
        return Beat.from_buffer_copy(self._memory, number * _RECORD_BYTES)

    def notes(self) -> dict[str, Any]:
        """Return the notes of the process, which contain its exit `status` once it ends."""
        lines = self._memory[_NOTES : _NOTES + self.main().note_bytes].splitlines()
        return {name: value for line in lines for name, value in json.loads(line).items()}


_process_heartbeat: Heartbeat | None = None


def set_process_heartbeat(heartbeat: Heartbeat) -> None:
    """Set the heartbeat that the functions `beat` and `at_disk` of this module use."""
    global _process_heartbeat
    _process_heartbeat = heartbeat


def beat() -> None:
    """Record progress in the heartbeat of this process, if it has one."""
    if _process_heartbeat is not None:
        _process_heartbeat.beat()


@contextlib.contextmanager
def at_disk() -> Iterator[None]:
    """Mark a disk operation in the heartbeat of this process, if it has one."""
    with contextlib.nullcontext() if _process_heartbeat is None else _process_heartbeat.at_disk():
        yield
