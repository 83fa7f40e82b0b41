"""The benchmark counts wrong elements, and its times are those of the slowest rank."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import RankFailure, run_ranks
from trainer.comm import bench
from trainer.comm.algorithms.all_reduce import ALGORITHMS
from trainer.comm.transport.executor import CpuExecutor


def _bench(*argv: str) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = bench.main(argv)
    return code, out.getvalue()


@pytest.mark.parametrize(("numel", "world_size"), [(1, 1), (7, 3), (3, 7), (1000, 4), (0, 2)])
def test_the_sum_is_known_without_the_network(numel: int, world_size: int) -> None:
    pairs = [bench.addends(numel, rank, world_size) for rank in range(world_size)]
    total = torch.stack([mine for mine, _ in pairs]).sum(0)
    assert all(torch.equal(known, total) for _, known in pairs)
    if numel >= 7:
        assert not torch.equal(pairs[0][0], pairs[1][0])
        assert total.abs().max() > 0


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ([], "fp32 sent as fp32"),
        pytest.param(["--wire-dtype", "bf16"], "fp32 sent as bf16", marks=pytest.mark.slow),
        pytest.param(["--dtype", "fp64"], "fp64", marks=pytest.mark.slow),
    ],
)
def test_every_algorithm_is_right(options: list[str], sent: str, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    command = ["--sizes", "0,8,40000", "--rounds", "2", "--json", str(file), *options]
    results = run_ranks(_bench, 3, *command, init=False, hosts=[0, 0, 1])
    assert [code for code, _ in results] == [0, 0, 0], results
    assert sent in results[0][1]
    assert results[1][1] == ""
    rows = json.loads(file.read_text())["rows"]
    assert {(row["size"], row["algorithm"]) for row in rows} == {
        (size, algorithm) for size in (0, 8, 40000) for algorithm in ("native", *ALGORITHMS)
    }
    for row in rows:
        assert row["algbw_gb_s"] == pytest.approx(row["size"] / row["seconds"] / 1e9)
        assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] * 4 / 3)


def _with_double(double: str, *argv: str) -> tuple[int, str]:
    """Rank 1 has a faulty executor."""
    right = CpuExecutor.run

    def zeros(self: CpuExecutor, bucket: torch.Tensor, divisor: int = 1) -> Any:
        waited = right(self, bucket, divisor)
        bucket[-3:] = 0
        return waited

    def slow(self: CpuExecutor, bucket: torch.Tensor, divisor: int = 1) -> Any:
        waited = right(self, bucket, divisor)
        time.sleep(0.5)
        return waited

    def dead(self: CpuExecutor, bucket: torch.Tensor, divisor: int = 1) -> Any:
        os._exit(9)

    if os.environ["RANK"] == "1":
        CpuExecutor.run = {"zeros": zeros, "slow": slow, "dead": dead}[double]  # type: ignore[method-assign]
    return _bench(*argv)


def test_wrong_elements_are_counted() -> None:
    command = ["--sizes", "4000", "--rounds", "1", "--algorithms", "native,ring"]
    results = run_ranks(_with_double, 2, "zeros", *command, init=False)
    assert [code for code, _ in results] == [1, 1]
    native, ring = results[0][1].splitlines()[-2:]
    assert native.endswith(" 0")
    wrong = int(ring.split()[-1])
    expected = bench.addends(1000, 0, 2)[1][-3:].count_nonzero()
    assert wrong == expected > 0


@pytest.mark.slow
def test_the_time_is_that_of_the_slowest_rank(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    command = ["--sizes", "4000", "--rounds", "3", "--algorithms", "native,ring", "--json", str(file)]
    run_ranks(_with_double, 2, "slow", *command, init=False)
    _, ring = (row["seconds"] for row in json.loads(file.read_text())["rows"])
    assert ring >= 0.5  # on rank 0, which is not the slow one


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RankFailure, match="rank 1: died with exit code 9") as failure:
        run_ranks(_with_double, 2, "dead", "--sizes", "4000", "--algorithms", "ring", init=False)
    code, out = failure.value.results[0]
    assert code == 1
    assert "rank 1 (host 0" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--sizes 4Q", "'4Q' is not a size"),
        ("--algorithms ring,rung", "unknown: rung; choose from native, ring"),
        ("--rounds 0", "--rounds 0"),
        ("--wire-dtype fp8", "fp8"),
    ],
)
def test_mistakes_are_told(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        bench.main(command.split())
    assert end.value.code == 2
    assert message in capsys.readouterr().err
