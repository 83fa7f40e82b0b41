"""The preflight on real processes and hosts: it passes if all is well, and names each fault."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from planner import comm as plan
from tests.hosts import hosts
from tests.programs import finish_ranks
from tests.ranks import run_ranks
from trainer.comm import preflight
from trainer.comm.algorithms.all_reduce import ALGORITHMS
from trainer.comm.preflight_checks import OPERATIONS


def _preflight(*argv: str) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = preflight.main(list(argv))
    return code, out.getvalue()


@pytest.mark.slow
def test_all_operations_pass_and_one_rank_prints(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    results = run_ranks(_preflight, 3, "--json", str(file), init=False)
    assert [code for code, _ in results] == [0] * 3
    assert all(text == "" for _, text in results[1:]), "rank 0 alone prints"
    table = results[0][1]
    assert table.startswith("preflight: 1 hosts, 3 processes, gloo on cpu") and "all passed" in table
    rows = [line for line in table.splitlines() if line.endswith("  pass")]
    assert len(rows) == len(OPERATIONS) and json.loads(file.read_text())["passed"] is True


def test_one_process_has_no_peers_and_results_that_cannot_be_written_are_no_success(tmp_path: Path) -> None:
    file = tmp_path / "missing" / "results.json"
    [ended] = finish_ranks([0], "-m", "trainer.comm.preflight", "--json", str(file))
    assert ended.code == 2 and "all passed" in ended.stdout
    assert f"--json {file} cannot be written" in ended.stderr


def test_nccl_needs_a_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit) as ended:
        preflight.main(["--backend", "nccl"])
    assert ended.value.code == 2 and "--backend nccl needs a GPU" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.netns
def test_two_hosts_are_measured_and_planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Results that depend on the speed of this machine are in benchmarks/predictions.py."""
    file = tmp_path / "results.json"
    with hosts(2, rate="200mbit") as (a, b):
        ranks = finish_ranks([a, a, b, b], "-m", "trainer.comm.preflight", "--json", str(file))
    assert [rank.code for rank in ranks] == [0] * 4, ranks
    assert "2 hosts, 4 processes" in ranks[0].stdout and "0 -> 1" in ranks[0].stdout
    links = {(link["source"], link["target"]): link for link in json.loads(file.read_text())["links"]}
    assert set(links) == {(0, 0), (1, 1), (0, 1), (1, 0)}
    # A busy machine is slower than its link; a stream that it cuts short fits into the link's own buffer.
    assert all(0 < links[ends]["gbit_s"] < 0.4 for ends in ((0, 1), (1, 0)))
    assert all(0 < value < math.inf for link in links.values() for value in list(link.values())[2:])

    asked = ["--hosts", "2", "--per-host", "2", "--from", str(file)]
    assert plan.main(asked) == 0
    table = capsys.readouterr().out
    assert "measured by the preflight" in table and all(name in table for name in ALGORITHMS)
    predicted = plan.parse([*asked, "--gbit", "0.001"]).world.all_reduces(25e6)  # over each link 1, 1.5, 2 N
    order = [name for name in predicted if name in ("hierarchical", "ring", "master_worker")]
    assert order == ["hierarchical", "ring", "master_worker"]


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


@pytest.mark.slow
def test_a_wrong_result_is_named() -> None:
    results = run_ranks(_zeros_from, 2, "all_to_all_single", init=False)
    assert [code for code, _ in results] == [1, 1]
    table = results[0][1]
    row = next(line for line in table.splitlines() if line.startswith("all_to_all"))
    assert "FAIL on ranks [1]" in row
    assert f"rank 1 (host 0) on {os.uname().nodename}: all_to_all (cpu): element" in table


HANGS = """
import os, time
import torch.distributed
from trainer.comm import preflight
if os.environ["RANK"] == "1":
    torch.distributed.all_to_all_single = lambda *_, **__: time.sleep(1000)
preflight.main(["--timeout-s", "2"])
"""


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    ranks = finish_ranks([0, 0, 0], str(tmp_path / "hangs.py"))
    assert all(rank.code for rank in ranks)
    told = "".join(rank.stderr for rank in ranks)
    assert re.search(r"rank 1 \(host 0.* hangs in the set-up", told), told


NO_SUCH_INTERFACE = """
import os, sys
if os.environ["RANK"] == "1":
    os.environ["GLOO_SOCKET_IFNAME"] = "nope0"
from trainer.comm import preflight
sys.exit(preflight.main([]))
"""


@pytest.mark.slow
def test_an_interface_that_a_host_lacks_is_named_with_its_rank(tmp_path: Path) -> None:
    """And where gloo listens is said before anything fails."""
    (tmp_path / "lacks.py").write_text(NO_SUCH_INTERFACE)
    ranks = finish_ranks([0, 0], str(tmp_path / "lacks.py"))
    told = "".join(rank.stderr for rank in ranks)
    assert [rank.code for rank in ranks] == [2, 2], told
    assert "gloo listens at lo; the interfaces are lo" in told
    assert "rank 1: GLOO_SOCKET_IFNAME=nope0, but" in told and "hangs" not in told
