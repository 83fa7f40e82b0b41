"""Processes that stand by for a restart: they become its ranks, and none is left over."""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import drilled_run
from tests.fault_parts import fault
from tests.programs import Program, finish_ranks, started
from tests.ranks import run_ranks
from trainer.launch import fresh, local_ranks
from trainer.launch.local_ranks import LocalRanks, stands_by


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRanks]:
    """Two, for whom processes stand by that load nothing."""
    monkeypatch.setattr(local_ranks, "_STANDBY", "tests.launch.waiting")
    monkeypatch.setattr(
        fresh, "program", lambda: ["sh", "-c", f"echo $0 > {tmp_path}/started-$RANK; exit $1"]
    )
    monkeypatch.setenv("OUT", str(tmp_path / "told"))
    ranks = LocalRanks(2)
    yield ranks
    ranks.end()


def until(holds: Callable[[], bool], otherwise: Callable[[], object] = lambda: "") -> None:
    deadline = time.monotonic() + 200
    while not holds():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.02)


def codes(ranks: LocalRanks) -> list[int]:
    return [process.wait(100) for process in ranks.started]


def told(tmp_path: Path, rank: int) -> dict[str, object]:
    return dict(json.loads((tmp_path / f"told-{rank}").read_text()))


def test_standbys_become_the_ranks_with_the_command_line_of_the_restart(
    ranks: LocalRanks, tmp_path: Path
) -> None:
    until(lambda: ranks.stand_by(2))
    assert not ranks.started
    assert ranks.begin(["resume=auto", "3"]) == 2
    assert codes(ranks) == [3, 3]
    for rank in (0, 1):
        words = {"argv": ["resume=auto", "3"], "rank": str(rank), "pid": ranks.started[rank].pid}
        assert told(tmp_path, rank) == words


def test_one_that_is_not_ready_yet_becomes_a_rank_too(ranks: LocalRanks) -> None:
    ranks.stand_by(1)
    assert ranks.begin(["resume=auto", "4"]) == 1
    assert codes(ranks)[0] == 4


def test_a_standby_that_has_ended_is_replaced_and_others_are_started(
    ranks: LocalRanks, tmp_path: Path
) -> None:
    until(lambda: ranks.stand_by(1))
    (standby,) = [pid for pid in children() if stands_by(pid)]
    os.kill(standby, signal.SIGKILL)
    os.waitid(os.P_PID, standby, os.WEXITED | os.WNOWAIT)  # its command line is gone before it has ended
    assert ranks.begin(["resume=auto", "7"]) == 0
    assert codes(ranks) == [7, 7]
    assert [(tmp_path / f"started-{rank}").read_text() for rank in (0, 1)] == ["resume=auto\n"] * 2


def test_who_counts_ranks_counts_a_standby_once_it_has_begun(
    ranks: LocalRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(drilled_run.MARK, mark := f"standby-{os.getpid()}")
    until(lambda: ranks.stand_by(2))
    assert drilled_run.ranks_of(mark) == {}
    assert sum(map(stands_by, children())) == 2


def test_standbys_that_nobody_needs_are_ended(ranks: LocalRanks) -> None:
    until(lambda: ranks.stand_by(2))
    standbys = [pid for pid in children() if stands_by(pid)]
    ranks.end()
    assert len(standbys) == 2 and not set(standbys) & set(children())


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]


# ---- whole runs


def command(run_dir: Path, *overrides: str) -> list[str]:
    options = ["strategy=ddp", "train.max_steps=9", "train.log_every_steps=1", "checkpoint.every_epochs=null"]
    return ["train.py", *options, f"run_dir={run_dir}", *overrides]


def standbys_of(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and stands_by(int(folder.name)):
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            found += [int(folder.name)] if f"{drilled_run.MARK}={mark}".encode() in environment else []
    return found


WAITS = "distributed.timeout_s=200"  # for a rank that hangs until it is killed


def wait_for_standbys(program: Program, mark: str, count: int) -> list[int]:
    until(lambda: len(standbys_of(mark)) == count or program.poll() is not None, lambda: program.stderr)
    assert program.poll() is None, program.stderr
    return standbys_of(mark)


@pytest.mark.slow
def test_a_restart_goes_through_standbys_and_ends_like_an_undisturbed_run(tmp_path: Path) -> None:
    assert [rank.code for rank in finish_ranks(2, *command(tmp_path / "whole"))] == [0, 0]
    launch = ("launch=local", "launch.processes=2", "launch.max_restarts=1")
    hangs = fault("hang", step=5, mark=tmp_path / "mark")
    env = {drilled_run.MARK: (mark := f"hangs-{os.getpid()}")}
    with started(*command(tmp_path / "run", *launch, *hangs, WAITS), env=env, forks=True) as program:
        standbys = wait_for_standbys(program, mark, 2)
        ranks = program.ranks()
        assert len(ranks) == 2 and not set(standbys) & set(ranks)
        os.kill(ranks[1], signal.SIGKILL)
        ended = program.wait()
    assert ended.code == 0, ended.output
    assert "2 of its ranks stood by" in ended.stderr
    hashes = [
        json.loads((tmp_path / run / "result.json").read_text())["param_sha256"] for run in ("run", "whole")
    ]
    assert hashes[0] == hashes[1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_stopped_leaves_no_standby(number: int, tmp_path: Path) -> None:
    """Nor a rank: the guard of tests.conftest would fail this one."""
    endless = ("train.max_steps=1000000", "train.epochs=1000000", "train.eval_every_epochs=0")
    launch = ("launch=local", "launch.processes=1", "launch.max_restarts=1", *endless)
    env = {drilled_run.MARK: (mark := f"stopped-{os.getpid()}")}
    with started(*command(tmp_path / "run", *launch), env=env, forks=True) as program:
        wait_for_standbys(program, mark, 1)
        program.send_signal(number)
        ended = program.wait()
        assert ended.code == (-number if number == signal.SIGKILL else 75), ended.output
        until(lambda: not standbys_of(mark))


def ended_standby(*words: str) -> object:
    """The status with which a standby ends that begins with this command line."""
    here, there = socket.socketpair()
    here.sendall(json.dumps(words).encode() + b"\n")
    sys.argv = ["standby", str(there.detach())]
    with here, pytest.raises(SystemExit) as end:
        runpy.run_module("trainer.standby", run_name="__main__")
    return end.value.code


@pytest.mark.slow
@pytest.mark.parametrize(("status", "end"), [(2, "optim.lr=-1"), (3, "nan")])
def test_the_status_of_a_run_in_a_standby_arrives(status: int, end: str, tmp_path: Path) -> None:
    """Each ends as a rank would that was started for it. With 0: the restart above; 1 is Python's for any exception."""
    ends = fault("nan", rank=0, step=2) if end == "nan" else (end,)
    words = command(tmp_path / "run", "strategy=single", *ends)[1:]
    assert run_ranks(ended_standby, 1, *words, init=False, fresh=True) == [status]
