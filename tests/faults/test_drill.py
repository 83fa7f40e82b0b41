"""The drill (benchmarks/drill.py): a fault under torchrun is named in time, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.drill import drill
from benchmarks.drilled_run import PROGRAM, STEP, Case, Outcome, Start
from tests.forked import Forked
from tests.programs import finish_ranks

VERDICT = {"status": 1, "rank": 1, "phase": "forward", "step": STEP}
RIGHT = Outcome(verdict=VERDICT, verdict_s=0.1, end_s=14.0, sha256="same")


def test_what_counts_as_right() -> None:
    wrong = {
        "no verdict": replace(RIGHT, verdict=None),
        "rank 0, not 1": replace(RIGHT, verdict=VERDICT | {"rank": 0}),
        "step 25, not 30": replace(RIGHT, step=30),
        "not gone within 15 s": replace(RIGHT, end_s=None),
        "another hash": replace(RIGHT, sha256=None),
        "left behind: process 7": replace(RIGHT, left=["process 7"]),
    }
    assert RIGHT.problems(Case("ddp", "ring", "kill"), "same", 10.0) == []
    for words, outcome in wrong.items():
        assert outcome.problems(Case("ddp", "ring", "kill"), "same", 10.0) == [words]


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_run_goes_on_to_the_same_hash(tmp_path: Path, forked: Forked) -> None:
    killed = forked.torchrun(2)

    def start(overrides: Sequence[str], environment: dict[str, str], folder: Path) -> list[Any]:
        if any("fault" in word for word in overrides):
            return killed(overrides, environment, folder)
        ranks = finish_ranks(2, str(PROGRAM), *overrides, env=environment)  # it needs no torchrun
        (folder / "output").write_text("".join(rank.output for rank in ranks))
        return []

    todo = [Case("ddp", "native", "none"), Case("ddp", "native", "kill", "backward")]
    starts: Start = start
    assert drill(todo, starts, tmp_path) == []
