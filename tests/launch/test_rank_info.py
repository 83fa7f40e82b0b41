"""The rank of a process from the variables of each launcher; contradicting variables raise an error."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.programs import started
from tests.ranks import RankFailure, run_ranks
from tests.runs import settings
from trainer.config.overrides import set_to
from trainer.distributed import rendezvous
from trainer.errors import RetryableError, StoppedBySignal, UserError
from trainer.launch.rank_info import RankInfo, derived_port, first_node, publish, rank_info

ROOT = Path(__file__).parents[2]
LAUNCHERS = re.compile(
    r"RANK|WORLD_SIZE|MASTER_|LOCAL_|GROUP_|PET_|TORCHELASTIC|SLURM_|OMPI_|PMIX?_|MPI_LOCAL"
)

SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "127.0.0.[1-9]",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "4",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "156762113",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "a"}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "29500"}
ALONE_IN_SRUN = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}

InfoOf = Callable[..., RankInfo]


@pytest.fixture
def info_of(monkeypatch: pytest.MonkeyPatch) -> InfoOf:
    """Return the result of `rank_info` for exactly these variables, and these overrides."""

    def info_of(variables: dict[str, str], *overrides: str) -> RankInfo:
        for name in [name for name in os.environ if LAUNCHERS.match(name)]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return rank_info(settings(*overrides).distributed if overrides else None)

    return info_of


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, RankInfo(0, 1, 0, 1, 0, None, None)),
        (TORCHRUN, RankInfo(3, 8, 1, 2, 1, "torchrun", "env://")),
        (SRUN, RankInfo(2, 4, 1, None, 1, "srun", f"tcp://127.0.0.1:{derived_port('7.0')}")),
        (SRUN | {"MASTER_ADDR": "b", "MASTER_PORT": "9"}, RankInfo(2, 4, 1, None, 1, "srun", "tcp://b:9")),
        (OPEN_MPI, RankInfo(1, 2, 1, 2, None, "mpirun", f"tcp://127.0.0.1:{derived_port('156762113')}")),
        (PMI | {"MASTER_PORT": "9"}, RankInfo(1, 4, 0, 2, None, "mpirun", "tcp://a:9")),
        (BY_HAND, RankInfo(1, 2, None, None, None, None, "tcp://[::1]:29500")),
        # Job scripts with export RANK=$SLURM_PROCID; one srun per rank; torchrun started by srun on each host.
        (
            SRUN | {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "b", "MASTER_PORT": "9"},
            RankInfo(2, 4, None, None, None, None, "tcp://b:9"),
        ),
        (BY_HAND | {"MASTER_ADDR": "[::1]"}, RankInfo(1, 2, None, None, None, None, "tcp://[::1]:29500")),
        (ALONE_IN_SRUN | BY_HAND, RankInfo(1, 2, None, None, None, None, "tcp://[::1]:29500")),
        (ALONE_IN_SRUN, RankInfo(0, 1, 0, 1, 0, "srun", None)),
        (SRUN | TORCHRUN, RankInfo(3, 8, 1, 2, 1, "torchrun", "env://")),
        # mpirun starts a daemon on each host by srun, and the ranks inherit its variables.
        (
            ALONE_IN_SRUN | OPEN_MPI,
            RankInfo(1, 2, 1, 2, None, "mpirun", f"tcp://127.0.0.1:{derived_port('156762113')}"),
        ),
        (SRUN | PMI | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "MASTER_PORT": "9"}, RankInfo(1, 4, 0, 2, None, "mpirun", "tcp://a:9")),
    ],
)  # fmt: skip
def test_the_variables_of_each_launcher(
    info_of: InfoOf, variables: dict[str, str], expected: RankInfo
) -> None:
    assert info_of(variables) == expected


@pytest.mark.parametrize(("shell", "world_size"), [(["-i"], 1), (["-c", "read wait; true"], 4)])
def test_an_interactive_shell_is_not_a_task(info_of: InfoOf, shell: list[str], world_size: int) -> None:
    """A program started in the shell of `srun -n4 --pty bash` is not a task either, unlike in a script."""
    terminal, its_end = pty.openpty()
    command = ["setsid", "--ctty", "bash", "--norc", *shell]
    process = subprocess.Popen(command, stdin=its_end, stdout=its_end, stderr=its_end)
    task = {**SRUN, "SLURM_TASK_PID": str(process.pid), "SLURM_PROCID": "0"}
    try:
        deadline = time.monotonic() + 100
        while Path(f"/proc/{process.pid}/cmdline").read_bytes()[:4] != b"bash":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        while world_size == 1 and info_of(task).world_size > 1 and time.monotonic() < deadline:
            time.sleep(0.02)  # still starting
        assert info_of(task).world_size == world_size
        if world_size == 1:
            assert info_of(task | TORCHRUN | {"GROUP_WORLD_SIZE": "1"}).under_torchrun
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
        os.close(its_end)


def test_manual_start_by_settings(info_of: InfoOf) -> None:
    by_hand = ("distributed.init_method=file:///tmp/x", "distributed.rank=1", "distributed.world_size=2")
    assert info_of({}, *by_hand) == RankInfo(1, 2, None, None, None, None, "file:///tmp/x")
    assert info_of(ALONE_IN_SRUN, *by_hand) == RankInfo(1, 2, None, None, None, None, "file:///tmp/x")
    assert info_of(SRUN, by_hand[0]) == RankInfo(2, 4, 1, None, 1, "srun", "file:///tmp/x")


@pytest.mark.parametrize(
    ("variables", "overrides", "named"),
    [
        (SRUN | {"RANK": "0", "WORLD_SIZE": "1"}, (), r"RANK=0 contradicts SLURM_PROCID=2"),
        (SRUN | TORCHRUN | {"GROUP_WORLD_SIZE": "1"}, (), r"SLURM_STEP_NUM_TASKS=4.*a run of its own.*--nnodes"),
        (SRUN, ("distributed.rank=0",), r"distributed.rank=0 contradicts SLURM_PROCID=2"),
        ({"RANK": "1"}, (), r"RANK=1, but WORLD_SIZE is not set"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, (), r"RANK=4, but WORLD_SIZE=4: the rank must be from 0 to 3"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, (), r"RANK=-1: expected an integer"),
        ({"RANK": "1", "WORLD_SIZE": "4"}, (), r"WORLD_SIZE=4, but the address of rank 0 is unknown.*MASTER_ADDR"),
        ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}, (), r"MASTER_PORT is not"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (), r"SLURM_NTASKS=4, but this process would train on its own, because it was not started by srun"),
        ({"PET_NNODES": "2"}, (), r"PET_NNODES=2, but this process would train on its own, because it was not started by torchrun"),
        ({}, ("distributed.init_method=tcp://a:1",), r"tcp://a:1 is set, but the rank of this process is not"),
        ({}, ("distributed.init_method=tcp://a",), r"init_method is tcp://a, but must be env://, tcp://HOST:PORT"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_by_name(
    info_of: InfoOf, variables: dict[str, str], overrides: tuple[str, ...], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        info_of(variables, *overrides)


def test_publish_sets_the_variables_of_torchrun(info_of: InfoOf, monkeypatch: pytest.MonkeyPatch) -> None:
    for variables in (SRUN, OPEN_MPI, PMI | {"MASTER_PORT": "9"}):
        here = info_of(variables)
        monkeypatch.setattr(os, "environ", dict(os.environ))
        publish(here)
        again = rank_info()
        assert replace(here, launcher=None, host=again.host) == again
        monkeypatch.undo()


def test_the_first_node_of_a_list() -> None:
    lists = {"rack[1,3-4]node[08-10]-ib,login": "rack1node08-ib", "a,b[1-2]": "a", "gpu7": "gpu7"}
    assert {nodes: first_node(nodes) for nodes in lists} == lists


def test_rank_info_does_not_import_torch() -> None:
    script = "import sys, trainer.launch.rank_info, trainer.launch.exits; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=200).returncode == 0


# ---- rendezvous


def met(init_method: str, times: int = 1, patience_s: float = 30) -> tuple[int, int, int, tuple[int, ...]]:
    """Join as the rank in RANK, but with explicit settings, and leave again."""
    from trainer.distributed.process_group import process_group

    rank = os.environ["RANK"]
    for name in [name for name in os.environ if LAUNCHERS.match(name)]:
        del os.environ[name]
    by_hand = (
        f"distributed.init_method={init_method}",
        f"distributed.rank={rank}",
        "distributed.world_size=2",
    )
    config = settings(*by_hand, f"distributed.timeout_s={patience_s}").distributed
    for _ in range(times):  # a run must leave nothing that disturbs the next run
        with process_group(config) as here:
            total = [0, 0]
            dist.all_gather_object(total, here.rank + 1)
            assert total == [1, 2]
    return here.rank, here.local_rank, here.local_world_size, here.hosts


def none_comes(init_method: str) -> None:
    rendezvous.AT_LEAST_S = 0
    met(init_method, patience_s=1)


@pytest.mark.slow
def test_ranks_started_by_hand_join_in_a_file_after_a_failed_rendezvous(tmp_path: Path) -> None:
    file = tmp_path / "new" / "meeting place"
    with pytest.raises(RankFailure) as failure:
        run_ranks(none_comes, 1, file.as_uri(), init=False)
    missing = "waited 1 s (distributed.timeout_s, at least 0) for all 2 ranks; missing: [1]"
    assert missing in str(failure.value)
    assert file.stat().st_size, "the meeting below finds entries of the first"
    places = run_ranks(met, 2, file.as_uri(), times=2, init=False)
    assert places == [(0, 0, 2, (0, 0)), (1, 1, 2, (0, 0))]


@pytest.mark.slow
def test_a_rank_that_was_started_twice_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "AT_LEAST_S", 0)
    file, patience = tmp_path / "store", timedelta(seconds=2)
    first = RankInfo(0, 3, None, None, None, None, file.as_uri())
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(rendezvous.join, replace(first, rank=rank), {}, patience) for rank in (0, 1)]
        while b"arrived/1" not in (file.read_bytes() if file.exists() else b""):
            assert not any(each.done() for each in waiting)
            time.sleep(0.01)
        with pytest.raises(UserError, match=r"^rank 1 was started twice at file://.*; start each rank once$"):
            rendezvous.join(replace(first, rank=1), {}, patience)
    assert all("missing: [2]" in str(each.exception()) for each in waiting)


@pytest.fixture
def of_torchrun(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankInfo]:
    """Return rank 0 of 2, and the agent's store in which it waits for rank 1."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in (variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    yield rank_info()
    del store


def test_a_failed_rendezvous_leaves_no_thread_in_the_store(
    of_torchrun: RankInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would abort the process when Python exits, and hide the message."""
    monkeypatch.setattr(rendezvous, "AT_LEAST_S", 0.1)
    before = set(threading.enumerate())
    with pytest.raises(RetryableError, match=r"for all 2 ranks; missing: \[1\]"):
        rendezvous.join(of_torchrun, {}, timedelta(seconds=0.1))
    deadline = time.monotonic() + 100
    while left := set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


@pytest.mark.slow
def test_ranks_may_arrive_later_than_timeout_s(
    of_torchrun: RankInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, imports may take that long; afterwards, timeout_s applies."""
    first, late = [], threading.Event()

    def come() -> None:
        first.append(rendezvous.join(of_torchrun, {}, timedelta(seconds=0.05)))
        late.set()

    threading.Thread(target=come, daemon=True).start()
    assert not late.wait(1), "it waits for no rank"
    store, hosts, _ = rendezvous.join(replace(of_torchrun, rank=1), {}, timedelta(seconds=0.05))
    assert late.wait(100)
    assert hosts == first[0][1] == [0, 0]
    assert store.timeout == first[0][0].timeout == timedelta(seconds=0.05)


def test_a_rank_that_waits_for_the_others_ends_on_a_signal(tmp_path: Path) -> None:
    file = tmp_path / "meeting place"
    alone = [f"distributed.init_method={file.as_uri()}", "distributed.rank=0", "distributed.world_size=2"]
    with started("train.py", *(set_to(*word.split("=", 1)) for word in alone)) as program:
        deadline = time.monotonic() + 100
        while not (file.exists() and file.stat().st_size):
            assert time.monotonic() < deadline, "rank 0 does not open the file"
            time.sleep(0.05)
        time.sleep(0.5)  # until it waits
        program.send_signal(signal.SIGTERM)
        ended = program.wait(60)
    assert ended.code == 75, ended.output
    assert ended.stderr.splitlines()[-1] == "stopped by a signal before all ranks had joined; no step was run"
    assert "Traceback" not in ended.output


def test_a_stop_before_the_rendezvous_ends_it(tmp_path: Path) -> None:
    """Otherwise, it would wait a minute for a rank that the same signal has ended."""
    alone = RankInfo(0, 2, None, None, None, None, f"file://{tmp_path}/store")
    with pytest.raises(StoppedBySignal, match="before all ranks had joined"):
        rendezvous.join(alone, {}, timedelta(seconds=60), lambda: True)


def test_the_limit_of_open_files_is_raised() -> None:
    program = "import resource, trainer.launch.new_process as f; f.raise_file_limit(); print(*resource.getrlimit(7))"
    command = ["bash", "-c", f"ulimit -Sn 100; exec {sys.executable} -c '{program}'"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    soft, hard = done.stdout.split()
    assert soft == hard
