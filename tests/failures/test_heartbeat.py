"""A heartbeat can be read by other processes of the host, before and after its process dies."""

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.runs import settings
from trainer.failures.heartbeat import Heartbeat, Records
from trainer.failures.neighbour import Neighbour, RankIdentity, introduction
from trainer.failures.stacks import Stacks


def test_records_can_be_read() -> None:
    heartbeat = Heartbeat()
    records = Records.of(os.getpid(), heartbeat.fd)
    assert (records.main().phase, records.main().position, records.notes()) == ("set_up", 0, {})
    heartbeat.step = 7
    before = time.monotonic_ns()
    heartbeat.enter("backward")
    heartbeat.enter("all_reduce", bucket=2)
    beat = records.main()
    assert (beat.step, beat.phase, beat.position, beat.bucket, beat.buckets) == (7, "backward", 1, 2, 1)
    assert before <= beat.progress_ns <= time.monotonic_ns()
    heartbeat.enter("optimizer")
    assert (records.main().bucket, records.main().position) == (None, 2)


def test_notes_may_contain_any_characters() -> None:
    heartbeat, error = Heartbeat(), "\U0001f4a5\udc80" * 500
    heartbeat.note(status=1, error=error)
    heartbeat.note(saver=3, status=2)
    assert Records(heartbeat._memory).notes() == {"status": 2, "error": error, "saver": 3}


@pytest.mark.parametrize(
    ("phase", "is_silent"), [("forward", True), ("evaluate", True), ("checkpoint", False)]
)
def test_a_disk_operation_is_progress_of_a_rank_that_waits_for_it(phase: str, is_silent: bool) -> None:
    """During an asynchronous save, a rank that hangs in a step is silent."""
    heartbeat, stacks = Heartbeat(), Stacks()
    neighbour = Neighbour(
        RankIdentity(host=0, address=None, rendezvous_port=0, **introduction(0, heartbeat, stacks))
    )
    heartbeat.enter(phase)
    time.sleep(0.2)
    with heartbeat.at_disk():
        silent_s = neighbour.observe().silent_s
    assert (silent_s >= 0.2) == is_silent
    neighbour.close()


def in_child(action: Callable[[], Any]) -> int:
    pid = os.fork()
    if not pid:
        action()
        signal.pause()
    return pid


def test_records_of_dead_processes_can_still_be_read() -> None:
    heartbeat = Heartbeat()
    first = heartbeat.reserve(2)

    def worker() -> None:
        heartbeat.become_worker(first + 1)
        heartbeat.read(41)

    records = Records.of(os.getpid(), heartbeat.fd)
    pid = in_child(worker)
    deadline = time.monotonic() + 100
    while not (workers := records.workers()) or workers[2].index is None:
        assert time.monotonic() < deadline
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    workers = records.workers()
    assert {number: (beat.pid, beat.phase, beat.index) for number, beat in workers.items()} == {
        2: (pid, "data", 41)
    }
    assert records.main().pid == os.getpid()


class Played(Heartbeat):
    """Records its calls, and writes to the memory of another heartbeat, which ranks have opened."""

    def __init__(self, other: Heartbeat) -> None:
        self.__dict__.update(other.__dict__)
        self._other = other
        self.phases: list[tuple[int, str]] = []

    def __del__(self) -> None:
        """Do nothing: the other heartbeat closes the memory."""

    def enter(self, phase: str, bucket: int = -1) -> None:
        self.phases.append((self.step, phase if bucket == -1 else f"{phase} {bucket}"))
        super().enter(phase, bucket)


def phases_of(run_dir: Path) -> list[tuple[int, str]]:
    from trainer.assemble import assemble
    from trainer.distributed.process_group import process_group
    from trainer.launch.signals import StopRequest
    from trainer.loop import fit

    sizes = ("train.global_batch_size=720", "train.epochs=1", "model.hidden=[32]")
    config = settings("comm=ring", f"run_dir={run_dir}", "train.log_every_steps=1", *sizes)
    with StopRequest() as stop_request, process_group(config.distributed) as ranks:
        played = Played(ranks.heartbeat)
        context = assemble(config, "tests", dataclasses.replace(ranks, heartbeat=played), stop_request)
        context.report.run_log.open()
        fit(context)
        context.checkpointer.saving.wait()
        context.strategy.close()
        context.report.run_log.close()
    return played.phases


@pytest.mark.slow
def test_a_run_records_its_phases(tmp_path: Path) -> None:
    """The phases are the same on all ranks, so that their number shows which rank is behind."""
    first, second = run_ranks(phases_of, 2, tmp_path, init=False)
    assert [line for line in first if "reduce" not in line[1]] == [
        line for line in second if "reduce" not in line[1]
    ]
    # After the dry run, ranks compare the contents of a checkpoint.
    dry_run = ["forward", "backward", "all_reduce 0", "evaluate", "evaluate", "checkpoint"]
    step = ["data", "forward", "backward", "all_reduce 0", "data", "optimizer", "log"]
    assert first == [
        (0, "data"),  # whether this epoch has any data
        *((1, phase) for phase in (*dry_run, *step)),
        (1, "evaluate"),
        (1, "evaluate"),
        (1, "checkpoint"),
        (1, "end"),
    ]
