"""The drill: what it counts as right, and that it follows a run to its end."""

import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.drill_two_hosts import cutting
from tests.forked import Forked
from tests.hosts import hosts
from tests.programs import finish_ranks, started
from trainer.faults import processes
from trainer.faults.drill import cases, drill, fitting_batch
from trainer.faults.injection.drilled_run import PROGRAM, STEP, Case, Outcome, Start

VERDICT = {"status": 1, "rank": 1, "phase": "forward", "step": STEP}
RIGHT = Outcome(verdict=VERDICT, verdict_s=0.1, end_s=14.0, sha256="same")


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (RIGHT, []),
        (replace(RIGHT, verdict=None), ["no verdict"]),
        (replace(RIGHT, verdict=VERDICT | {"rank": 0}), ["rank 0, not 1"]),
        (replace(RIGHT, verdict=VERDICT | {"phase": "data"}), ["phase data, not forward"]),
        (replace(RIGHT, step=30), ["step 25, not 30"]),
        (replace(RIGHT, end_s=15.5), ["not gone within 15 s"]),
        (replace(RIGHT, end_s=None), ["not gone within 15 s"]),
        (replace(RIGHT, sha256=None), ["another hash"]),
        (replace(RIGHT, left=["process 7"]), ["left behind: process 7"]),
    ],
)
def test_what_counts_as_right(outcome: Outcome, words: list[str]) -> None:
    assert outcome.problems(Case("ddp", "ring", "kill"), "same", 10.0) == words


@pytest.mark.parametrize(("processes", "size"), [(2, 64), (3, 63), (5, 60), (64, 64)])
def test_any_number_of_ranks_shares_the_batch_out_equally(processes: int, size: int) -> None:
    assert fitting_batch(processes) == f"train.global_batch_size={size}"


def test_a_slow_rank_is_to_be_named_and_no_failure() -> None:
    named = Outcome(
        outputs=["rank 1 (host 0, vm, pid 7) has been in forward of step 25 for 2.0 s"], sha256="same"
    )
    case = Case("ddp", "ring", "slow")
    assert named.problems(case, "same", 10.0) == []
    assert replace(named, outputs=["all well"]).problems(case, "same", 10.0) == ["not named as slow"]
    assert replace(named, verdict=VERDICT).problems(case, "same", 10.0) == ["failed"]


def test_the_undisturbed_run_comes_first_and_shards_do_not_diverge() -> None:
    names = [
        (case.name, case.fault) for case in cases(["ddp", "fsdp"], ["ring"], ["kill", "diverge"], "forward")
    ]
    assert names == [
        *(("ddp ring", fault) for fault in ("none", "kill", "diverge")),
        *(("fsdp ring", fault) for fault in ("none", "kill")),
    ]


def test_a_drill_that_is_told_to_stop_takes_its_launch_with_it(tmp_path: Path) -> None:
    """With a simulated launcher that ends on SIGTERM only; a second SIGTERM does not interrupt the first."""
    program = """
import subprocess, sys, time
from pathlib import Path
from trainer.faults import drill
def start(overrides, environment, folder):
    launcher = subprocess.Popen(["sleep", "600"])
    Path(sys.argv[1], "launcher").write_text(str(launcher.pid))
    return [launcher]
drill.main([drill.Case("ddp", "native", "none")], start, drill.parser(None, drill.FAULTS).parse_args([]))
"""
    (tmp_path / "program.py").write_text(program)
    with started(str(tmp_path / "program.py"), str(tmp_path), env={"TMPDIR": str(tmp_path)}) as drilling:
        deadline = time.monotonic() + 100
        while not (tmp_path / "launcher").exists() or not (tmp_path / "launcher").read_text():
            assert time.monotonic() < deadline, drilling.stderr
            time.sleep(0.02)
        drilling.send_signal(signal.SIGTERM)
        drilling.send_signal(signal.SIGHUP)
        assert drilling.wait().code in (128 + signal.SIGTERM, 128 + signal.SIGHUP)
    assert processes.state(int((tmp_path / "launcher").read_text())) == "dead"
    assert not list(tmp_path.glob("drill-*"))


def undisturbed_here(start: Start) -> Start:
    """`start` where there is a fault; the run without one needs no torchrun."""

    def begin(overrides: Sequence[str], environment: dict[str, str], folder: Path) -> list[Any]:
        if "fault=none" not in overrides:
            return start(overrides, environment, folder)
        ranks = finish_ranks(2, str(PROGRAM), *overrides, env=environment)
        (folder / "output").write_text("".join(rank.output for rank in ranks))
        return []

    return begin


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_run_goes_on_to_the_same_hash(tmp_path: Path, forked: Forked) -> None:
    todo = cases(["ddp"], ["native"], ["kill"], "backward")
    assert drill(todo, undisturbed_here(forked.torchrun(2)), tmp_path) == []


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.timeout(600)
def test_a_host_that_is_cut_off_is_named_on_both_sides(tmp_path: Path, forked: Forked) -> None:
    with hosts(2) as pair:
        todo = [cutting(case, pair) for case in cases(["ddp"], ["native"], ["cut"], "forward")]
        assert drill(todo, undisturbed_here(forked.on(pair, 1, "--max-restarts=1")), tmp_path) == []
