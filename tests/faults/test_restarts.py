"""torchrun --max-restarts with resume=auto: the run ends as if nothing had happened. Many more kills: see
benchmarks/restarts.py."""

import random
from pathlib import Path

import pytest

from benchmarks.drill_two_hosts import on
from benchmarks.restarts import SAVED, lose, problems_of_logs, run
from tests.hosts import hosts
from trainer.faults.drill import torchrun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEPS = 70


def test_a_run_killed_twice_ends_with_the_same_model_and_whole_logs(tmp_path: Path) -> None:
    draw, start = random.Random(), torchrun(2, "--max-restarts=2")
    expected, _ = run(start, tmp_path / "undisturbed", [], draw, steps=STEPS)
    result, rows = run(start, tmp_path / "killed", [SAVED + 3, STEPS - 8], draw, steps=STEPS)
    assert result["param_sha256"] == expected["param_sha256"], rows
    assert problems_of_logs(tmp_path / "killed" / "run", STEPS) == []


@pytest.mark.netns
def test_a_lost_host_leaves_the_rest_to_finish_with_the_same_batches(tmp_path: Path) -> None:
    with hosts(2) as pair:
        result, _ = lose(pair, tmp_path / "lost", "cut", steps=STEPS)
    assert (result["world_size"], result["steps"], result["samples_seen"]) == (2, STEPS, 64 * STEPS)
    assert problems_of_logs(tmp_path / "lost" / "run", STEPS) == []


@pytest.mark.netns
def test_a_run_on_two_hosts_goes_on_after_a_kill(tmp_path: Path) -> None:
    draw = random.Random()
    with hosts(2) as pair:
        start = on(pair, 1, "--max-restarts=1")
        expected, _ = run(start, tmp_path / "undisturbed", [], draw, steps=STEPS)
        result, rows = run(start, tmp_path / "killed", [SAVED + 3], draw, steps=STEPS)
    assert result["param_sha256"] == expected["param_sha256"], rows
    assert problems_of_logs(tmp_path / "killed" / "run", STEPS) == []
