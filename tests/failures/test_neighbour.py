"""Observation of the data workers of a rank, simulated by processes without a loader."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from trainer.failures.heartbeat import Heartbeat
from trainer.failures.neighbour import Neighbour, RankIdentity
from trainer.failures.stacks import Stacks


@contextlib.contextmanager
def worker(heartbeat: Heartbeat, number: int, busy: bool) -> Iterator[int]:
    pid = os.fork()
    if not pid:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        heartbeat.become_worker(number)
        heartbeat.read(7)
        if not busy:
            heartbeat.rest()
        signal.pause()
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_workers_in_the_middle_of_a_batch_are_reported_and_killed() -> None:
    heartbeat, stacks = Heartbeat(), Stacks()
    first = heartbeat.reserve(2)
    neighbour = Neighbour(RankIdentity(0, 0, "here", os.getpid(), heartbeat.fd, stacks.fd, 0))
    before = signal.getsignal(signal.SIGCHLD)
    with worker(heartbeat, first, busy=True) as busy, worker(heartbeat, first + 1, busy=False) as idle:
        deadline = time.monotonic() + 100
        records = neighbour.records
        while len(records.workers()) < 2 or len(neighbour.busy_workers(records.main())) != 1:
            assert time.monotonic() < deadline
        heartbeat.enter("optimizer")
        assert neighbour.stuck_worker() is None, "it is not waited for"
        neighbour.end_workers(idle=False)
        assert os.waitstatus_to_exitcode(os.waitpid(busy, 0)[1]) == -signal.SIGKILL
        assert os.waitpid(idle, os.WNOHANG) == (0, 0), "a worker between two batches hears torch itself"
        words = neighbour.stuck_worker(f"DataLoader worker (pid {busy}) is killed by signal: Killed.")
        assert words == f"its data worker {busy} died without a message while it read sample 7"
        neighbour.end_workers(idle=True)
        assert os.waitstatus_to_exitcode(os.waitpid(idle, 0)[1]) == -signal.SIGKILL
    signal.signal(signal.SIGCHLD, before)
    neighbour.close()
