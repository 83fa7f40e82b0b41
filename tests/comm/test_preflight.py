"""The preflight on real processes and hosts: it passes on working hosts, and names each defect."""

from __future__ import annotations

import contextlib
import io
import itertools
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
from trainer import accelerator
from trainer.comm import preflight
from trainer.comm.algorithms.all_reduce import ALGORITHMS
from trainer.comm.preflight_checks import OPERATIONS, rounds
from trainer.distributed.ranks import Ranks
from trainer.errors import UserError
from trainer.launch.rank_info import RankInfo


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


def test_one_process_passes_and_unwritable_results_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "missing" / "results.json"
    [ended] = finish_ranks([0], "-m", "trainer.comm.preflight", "--json", str(file))
    assert ended.code == 2 and "all passed" in ended.stdout
    assert f"--json {file} cannot be written" in ended.stderr


def test_nccl_needs_a_gpu_for_each_rank(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit) as ended:
        preflight.main(["--backend", "nccl"])
    assert ended.value.code == 2 and "--backend nccl needs a GPU" in capfd.readouterr().err
    monkeypatch.setattr(accelerator, "found", lambda wanted: ("cuda", 1))
    for launcher in ("srun", "torchrun"):
        here = RankInfo(1, 2, 1, 2, 0, launcher, "env://")
        monkeypatch.setattr(preflight, "rank_info", lambda here=here: here)
        assert preflight._settings(preflight._options(["--backend", "gloo"])).device == "cpu"
        refuses = pytest.raises(UserError, match=r"1 GPU.* 2 ranks; .*at most 1 processes.*--backend gloo")
        with refuses if launcher == "torchrun" else contextlib.nullcontext():  # srun shows each its own
            preflight._settings(preflight._options([]))


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

    options = ["--hosts", "2", "--per-host", "2", "--from", str(file)]
    assert plan.main(options) == 0
    table = capsys.readouterr().out
    assert "measured by the preflight" in table and all(name in table for name in ALGORITHMS)
    # Over each link 1, 1.5, 2 N.
    predicted = plan.parse([*options, "--gbit", "0.001"]).world.all_reduces(25e6)
    order = [name for name in predicted if name in ("hierarchical", "ring", "master_worker")]
    assert order == ["hierarchical", "ring", "master_worker"]


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 4, 7, 16])
def test_every_pair_of_hosts_is_measured_once_in_few_rounds(num_hosts: int) -> None:
    found = list(rounds(num_hosts))
    assert len(found) <= num_hosts
    assert all(len({host for pair in pairs for host in pair}) == 2 * len(pairs) for pairs in found)
    measured = sorted(tuple(sorted(pair)) for pairs in found for pair in pairs)
    assert measured == list(itertools.combinations(range(num_hosts), 2))


def _judged(speeds: dict[tuple[int, int], float], *argv: str) -> bool:
    """Return the preflight's conclusion about links with these speeds, with one rank per host."""
    num_hosts = 1 + max(source for source, _ in speeds)
    ranks = Ranks(0, 0, num_hosts, 1, tuple(range(num_hosts)), torch.device("cpu"), "gloo")
    reports: list[preflight.RankReport] = [
        preflight.RankReport(f"h{host}", "10.0.0.1", {}, [], {}) for host in range(num_hosts)
    ]
    for (source, target), gbit_s in speeds.items():
        link = {"source": source, "target": target, "latency_us": 50.0, "gbit_s": gbit_s}
        reports[source].links.append(link)
    return preflight._conclude(ranks, reports, preflight._options(list(argv)))


def test_slow_links_are_named_and_fail_below_min_gbit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = list(itertools.permutations(range(3), 2))
    one_link = {pair: 0.02 if set(pair) == {1, 2} else 17.0 for pair in pairs}
    assert _judged(one_link)
    warned = re.findall(
        r"^WARNING: host (\d) \(h\d\) -> host (\d) .*: 0.02 Gbit/s .* median of all hosts, 17",
        capsys.readouterr().out,
        re.M,
    )
    assert warned == [("1", "2"), ("2", "1")]
    one_host = {pair: 0.02 if 2 in pair else 17.0 for pair in pairs}  # most of the links
    assert _judged(one_host)
    assert capsys.readouterr().out.count("WARNING") == 4
    assert _judged(dict.fromkeys(pairs, 0.02))
    assert "WARNING" not in capsys.readouterr().out

    file = tmp_path / "results.json"
    assert not _judged(one_link, "--min-gbit", "1", "--json", str(file))
    table = capsys.readouterr().out
    assert "FAILED\nhost 1 (h1) -> host 2 (h2): 0.02 Gbit/s is less than --min-gbit 1\n" in table
    assert json.loads(file.read_text())["passed"] is False and "WARNING" not in table

    many = {pair: 0.5 + pair[0] for pair in itertools.permutations(range(100), 2)}
    assert _judged(many)
    table = capsys.readouterr().out
    assert len(table.splitlines()) < 60 and f"... and {len(many) - 12} more" in table


@pytest.mark.slow
@pytest.mark.netns
def test_a_link_that_loses_packets_one_way_is_named_before_gloo_uses_it() -> None:
    """Neither rank 0 nor ranks that call other collectives are blamed."""
    with hosts(3, rate=None) as members:
        members[1].lose_packets_to(members[2])
        ended = finish_ranks(members, "-m", "trainer.comm.preflight", "--timeout-s", "8")
    assert [rank.code for rank in ended] == [1, 1, 1]
    name = os.uname().nodename
    for rank in ended:
        for source, target in ((1, 2), (2, 1)):
            line = rf"host {source} \({name}\) cannot reach host {target} \({name}, 10.77.0.{target + 1}:\d+\): no answer"
            assert re.search(line, rank.stderr), rank.stderr
        assert rank.stderr.count("cannot reach") == 2
        assert "rank 0 (" not in rank.stderr


def _zeros_from(operation: str, *argv: str) -> tuple[int, str]:
    """Return a stand-in for torch.distributed in which one operation returns zeros on rank 1."""
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
    stderr = "".join(rank.stderr for rank in ranks)
    assert re.search(r"rank 1 \(host 0.* hangs in the set-up", stderr), stderr


NO_SUCH_INTERFACE = """
import os, sys
if os.environ["RANK"] == "1":
    os.environ["GLOO_SOCKET_IFNAME"] = "nope0"
from trainer.comm import preflight
sys.exit(preflight.main([]))
"""


@pytest.mark.slow
def test_a_missing_interface_is_named_with_its_rank(tmp_path: Path) -> None:
    """The address at which gloo listens is printed before the error."""
    (tmp_path / "lacks.py").write_text(NO_SUCH_INTERFACE)
    ranks = finish_ranks([0, 0], str(tmp_path / "lacks.py"))
    stderr = "".join(rank.stderr for rank in ranks)
    assert [rank.code for rank in ranks] == [2, 2], stderr
    assert "gloo listens at 127.0.0.1; the interfaces are lo" in stderr
    assert "rank 1: GLOO_SOCKET_IFNAME=nope0, but" in stderr and "hangs" not in stderr
