"""The preflight on real processes and hosts: it passes if all is well, and names each fault."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from planner import comm as plan
from tests.hosts import hosts
from tests.programs import finish_ranks
from tests.ranks import RankFailure, run_ranks
from trainer.comm import preflight
from trainer.comm.algorithms.all_reduce import ALGORITHMS
from trainer.comm.network import link_speeds
from trainer.comm.network.checks import CHECKS, NEED_TWO


def _preflight(*argv: str) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = preflight.main(list(argv))
    return code, out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_operations_pass(world_size: int, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    hosts = [0, 1, 2] if world_size == 3 else [0] * world_size
    results = run_ranks(_preflight, world_size, "--json", str(file), init=False, hosts=hosts)
    assert [code for code, _ in results] == [0] * world_size
    table = results[0][1]
    assert "all passed" in table
    assert all(text == "" for _, text in results[1:]), "rank 0 alone prints"
    ran = json.loads(file.read_text())["operations_ms"]
    assert set(ran) == set(CHECKS) - (NEED_TWO if world_size == 1 else set())
    assert (json.loads(file.read_text())["costs"]["crowded_bytes_per_s"] > 0) == (world_size == 3)
    if world_size > 1:
        assert "127.0.0.1" in table


def test_results_that_cannot_be_written_are_no_success(tmp_path: Path) -> None:
    file = tmp_path / "missing" / "results.json"
    [(code, out)] = run_ranks(_preflight, 1, "--json", str(file), init=False)
    assert code == 1
    assert f"--json {file}: No such file" in out


def test_nccl_needs_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    [(code, table)] = run_ranks(_preflight, 1, "--backend", "nccl", init=False)
    assert code == 1
    assert "connect failed: --backend nccl needs a GPU" in table


@pytest.mark.slow
@pytest.mark.netns
def test_two_hosts_are_measured_and_planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Results that depend on the speed of this machine are in benchmarks/predictions.py."""
    file = tmp_path / "results.json"
    with hosts(2, rate="200mbit") as (a, b):
        results = run_ranks(_preflight, 4, "--json", str(file), init=False, hosts=[a, a, b, b])
        assert [code for code, _ in results] == [0] * 4, results
        for host in (a, b):
            assert host.address in results[0][1]
    read = json.loads(file.read_text())
    rates = {(link["source"], link["target"]): link["gbit_s"] for link in read["links"]}
    assert set(rates) == {(0, 0), (1, 1), (0, 1), (1, 0)}
    # A busy machine is slower than its link; a stream that it cuts short fits into the link's own buffer.
    assert all(0 < rates[ends] < 0.4 for ends in ((0, 1), (1, 0)))
    assert all(0 < rate < math.inf for rate in rates.values())
    assert [host["interface"] for host in read["hosts"]] == ["eth0", "eth0"]

    asked = ["--hosts", "2", "--per-host", "2", "--from", str(file)]
    assert plan.main(asked) == 0
    table = capsys.readouterr().out
    assert "measured by the preflight" in table and all(name in table for name in ALGORITHMS)
    world = plan.parse([*asked, "--gbit", "0.001"]).world
    predicted = world.all_reduces(25e6)  # over each link 1, 1.5 and 2 N
    order = [name for name in predicted if name in ("hierarchical", "ring", "master_worker")]
    assert order == ["hierarchical", "ring", "master_worker"]
    assert all(0 < prediction.seconds < math.inf for prediction in predicted.values())


def _zeros_from(operation: str, *argv: str) -> tuple[int, str]:
    """A double of torch.distributed in which one operation gives zeros on rank 1."""
    right: Any = getattr(dist, operation)

    def broken(got: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = right(got, *args, **kwargs)
        if os.environ["RANK"] == "1":
            got.zero_()
        return work

    setattr(dist, operation, broken)
    return _preflight(*argv)


# Since torch 2.14, and before.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "row"),
    [
        ("all_reduce", "all_reduce"),
        ("broadcast", "broadcast"),
        ("recv", "send, recv"),
        ("scatter", "scatter"),
        ("reduce", "reduce"),
        (_ALL_GATHER, "all_gather"),
        (_REDUCE_SCATTER, "reduce_scatter"),
    ],
)
def test_a_wrong_result_is_named(operation: str, row: str) -> None:
    results = run_ranks(_zeros_from, 2, operation, "--timeout-s", "20", init=False)
    assert [code for code, _ in results] == [1, 1]
    table = results[0][1]
    assert "FAIL on ranks [1]" in next(line for line in table.splitlines() if line.startswith(row))
    assert f"rank 1 (host 0, {os.uname().nodename}): {row}" in table


def _stop_in(operation: str, *argv: str) -> tuple[int, str]:
    """Rank 1 does not return from one operation, like a process stopped by the kernel."""

    def stopped(*_: Any, **__: Any) -> None:
        time.sleep(1000)

    if os.environ["RANK"] == "1":
        setattr(dist, operation, stopped)
        os._exit = lambda code: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    return _preflight(*argv)


@pytest.mark.slow
def test_a_rank_that_hangs_names_itself() -> None:
    with pytest.raises(RankFailure, match="rank 1: died") as failure:
        run_ranks(_stop_in, 3, "scatter", "--timeout-s", "6", init=False)
    code, table = failure.value.results[0]
    assert code == 1
    assert "rank 1 (host 0" in table
    assert "scatter failed: no answer for" in table


def _freeze(pid: Path, *argv: str) -> tuple[int, str]:
    """Rank 1 is stopped by the kernel before its first check, so it cannot report. Rank 0 ends it finally."""
    if os.environ["RANK"] == "1":
        pid.write_text(str(os.getpid()))
        CHECKS["broadcast"] = lambda me: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[assignment, return-value]
    told = _preflight(*argv)
    if os.environ["RANK"] == "0":
        os.kill(int(pid.read_text()), signal.SIGKILL)
    return told


@pytest.mark.slow
def test_a_rank_that_is_silent_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="rank 1: died with exit code -9") as failure:
        run_ranks(_freeze, 3, tmp_path / "pid", "--timeout-s", "6", init=False)
    assert failure.value.results.keys() == {0, 2}
    code, table = failure.value.results[0]
    assert code == 1
    assert "rank 1 (host 0" in table
    assert "is silent" in table
    assert "GLOO_SOCKET_IFNAME" in table


def _absent(*argv: str) -> tuple[int, str]:
    """The others have joined before they begin to wait for rank 1."""
    rank = os.environ["RANK"]
    if rank == "1":
        return 0, ""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store.set(f"{rank} is here", "")
    store.wait([f"{other} is here" for other in (0, 2)])
    return _preflight(*argv)


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named() -> None:
    results = run_ranks(_absent, 3, "--timeout-s", "5", init=False)
    assert [code for code, _ in results] == [1, 0, 1]
    assert "missing: [1]" in results[0][1]


def test_a_wrong_interface_is_named() -> None:
    results = run_ranks(_preflight, 2, "--timeout-s", "3", init=False, env={"GLOO_SOCKET_IFNAME": "nope0"})
    assert [code for code, _ in results] == [1, 1]
    table = results[0][1]
    assert "connect failed" in table
    assert "GLOO_SOCKET_IFNAME=nope0" in table
    assert "lo (127.0.0.1)" in table


@pytest.mark.slow
@pytest.mark.netns
def test_a_link_that_goes_down_is_named(tmp_path: Path) -> None:
    with hosts(2) as (a, b):
        # The store is on host 0: host 1 can only report itself, and host 0 only sees that it is silent.
        out, begun = tmp_path / "rank1", tmp_path / "rank1.begun"

        def cut_when_begun() -> None:
            while not begun.exists():
                time.sleep(0.02)
            b.link_down()

        cut = threading.Thread(target=cut_when_begun, daemon=True)
        cut.start()
        with pytest.raises(RankFailure, match="rank 1: died with exit code 1") as failure:
            run_ranks(_slow_preflight, 2, str(out), "--timeout-s", "6", init=False, hosts=[a, b])
        cut.join()
    code, table = failure.value.results[0]
    assert code == 1
    assert "rank 1 (host 1" in table
    assert "is silent" in table
    assert re.search(
        r"rank 1 \(host 1.*the store of rank 0 at 10.77.0.1:29500 does not answer", out.read_text()
    )


def _slow_preflight(out: str, *argv: str) -> tuple[int, str]:
    """The output of rank 1 goes to a file, since it ends itself: its main thread is stuck on the dead network."""
    if os.environ["RANK"] == "1":
        os.dup2(os.open(out, os.O_CREAT | os.O_WRONLY), 2)
    first, *_ = CHECKS
    right = CHECKS[first]

    def slow(me: Any) -> Any:
        Path(f"{out}.begun").touch()
        time.sleep(1)
        return right(me)

    CHECKS[first] = slow
    return _preflight(*argv) if os.environ["RANK"] == "0" else (preflight.main(list(argv)), "")


def test_every_pair_meets_once() -> None:
    for count in range(1, 12):
        rounds = list(link_speeds.pairings(count))
        meetings = Counter(frozenset(pair) for pairs in rounds for pair in pairs)
        assert len(meetings) == count * (count - 1) // 2
        assert set(meetings.values()) <= {1}
        for pairs in rounds:
            players = [player for pair in pairs for player in pair]
            assert len(players) == len(set(players))


@pytest.mark.slow
@pytest.mark.netns
def test_as_a_program() -> None:
    with hosts(2) as (one, other):
        ranks = finish_ranks([one, one, other, other], "-m", "trainer.comm.preflight")
    assert [rank.code for rank in ranks] == [0] * 4, ranks
    assert "2 hosts, 4 processes" in ranks[0].stdout
    assert "all passed" in ranks[0].stdout
    assert not any(rank.stdout for rank in ranks[1:])
