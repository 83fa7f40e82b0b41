"""Keeps an update and a save at a fault apart."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trainer.faults.heartbeat import Heartbeat

UPDATE_S = 10.0  # for an update that has begun, at a fault


class Gate:
    """A lock that the main thread holds from before an update until its step is counted.

    The watch's thread saves the state while the main thread may still be at work. It takes the lock and never
    gives it back: no update begins while it reads, and it waits for one that has begun. An update waits for
    no other rank, so that wait is short. An exception within leaves the lock held: the state is then of no
    step.
    """

    changed: Sequence[str] = ()
    """Parameters, by name, that a forward pass changes, as the rehearsal found: of these there is no copy."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat, self._lock = heartbeat, threading.Lock()

    @contextmanager
    def update(self, step: int) -> Iterator[None]:
        """Around the update of `step`, until it is counted."""
        self._lock.acquire()
        yield
        self.keep()
        self._heartbeat.finished = step
        self._lock.release()

    def note_shared_buffers(self) -> None:
        """Called once in each step, when all ranks have the buffers that rank 0 had after the step before."""

    def keep(self) -> None:
        """Copy what may change before the next update; called once for each step."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around any other change of what a checkpoint holds; left whole also by an exception."""
        with self._lock:
            yield

    def take(self, timeout_s: float) -> bool:
        """Take it for good; False if an update goes on for longer, or has failed."""
        return self._lock.acquire(timeout=timeout_s)


class NoGate(Gate):
    """Of a run that saves nothing at a fault."""

    @contextmanager
    def update(self, step: int) -> Iterator[None]:
        yield
