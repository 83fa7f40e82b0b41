"""The benchmarks of faults, drill and rescues: what they count as right, and what they draw."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import drilled_run
from benchmarks.drilled_run import STEP, Outcome
from benchmarks.faulty_case import INJECTED, Case, Fault, Row
from benchmarks.faulty_run import FaultyRun
from benchmarks.rescues import at_random

VERDICT = {"status": 1, "rank": 1, "phase": "forward", "step": STEP}
RIGHT = Outcome(verdict=VERDICT, verdict_s=0.1, end_s=14.0, sha256="same")


def test_what_a_drill_counts_as_right() -> None:
    wrong = {
        "no verdict": replace(RIGHT, verdict=None),
        "rank 0, not 1": replace(RIGHT, verdict=VERDICT | {"rank": 0}),
        "step 25, not 30": replace(RIGHT, step=30),
        "not gone within 15 s": replace(RIGHT, end_s=None),
        "another hash": replace(RIGHT, sha256=None),
        "left behind: process 7": replace(RIGHT, left=["process 7"]),
    }
    assert RIGHT.problems(drilled_run.Case("ddp", "ring", "kill"), "same", 10.0) == []
    for words, outcome in wrong.items():
        assert outcome.problems(drilled_run.Case("ddp", "ring", "kill"), "same", 10.0) == [words]


DIED = "rank 1 (host 0, vm, pid 7) died of SIGKILL, in forward of step 5"
SAVED, UNSAVED = (
    "; step 4 is saved, by rank 0 in 0.1 s",
    "; no step is saved: the servers hold the parameters",
)


@pytest.mark.parametrize(
    ("facts", "problems"),
    [
        ({"lost": 1, "verdict": DIED + SAVED}, []),
        ({"lost": 2, "verdict": DIED + SAVED}, ["2 steps lost without a reason"]),
        ({"lost": 30, "verdict": DIED + UNSAVED}, []),
        ({"lost": -1, "verdict": DIED + SAVED}, ["resumed at a step that no rank had finished"]),
        ({"verdict": DIED.replace("pid 7", "pid 8")}, ["it blames rank 1, not [7]"]),
        ({"verdict": "all ranks wait"}, ["it blames nobody"]),
        ({"verdict": "", "verdict_s": None}, ["no verdict"]),
        ({"verdict": DIED + SAVED, "verdict_s": 30.0}, ["the verdict came after 30.0 s"]),
    ],
)
def test_what_a_rescue_counts_as_right(facts: dict[str, Any], problems: list[str], tmp_path: Path) -> None:
    case = Case("ddp", 2, (), 0)
    row = Row(case, "kill", **{"verdict_s": 0.5, **facts})
    FaultyRun(case, lambda *_: [], tmp_path)._judge(row, Fault("kill", 5), [7], [])
    assert row.misjudged + row.problems == problems


def test_a_case_of_a_soak_can_be_drawn_again_and_can_happen() -> None:
    cases = [at_random(seed) for seed in range(300)]
    assert cases == [at_random(seed) for seed in range(300)]
    assert {case.world for case in cases} == {1, 2, 3, 4}
    for case in cases:
        assert [fault.step for fault in case.faults] == sorted(fault.step for fault in case.faults)
        assert not any(fault.kind in INJECTED for fault in case.faults[1:])
        assert case.world > 1 or case.strategy in ("single", "dp")
        assert case.world > 1 or not {"stop", "hang"} & {fault.kind for fault in case.faults}
        assert case.world > 2 or not {"pair", "saver"} & {fault.kind for fault in case.faults}
