"""torchrun --max-restarts with resume=auto: the run ends as if nothing had happened. Many more kills: see
benchmarks/restarts.py."""

import json
import random
from pathlib import Path

import pytest

from benchmarks import restarts
from benchmarks.restarts import lose, overrides, problems_of_logs, run
from tests.forked import Forked
from tests.hosts import hosts
from tests.programs import finish_ranks

pytestmark = pytest.mark.slow
STEPS, SAVED = 20, 5


@pytest.fixture(autouse=True)
def _saves_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "SAVED", SAVED)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the same run on two ranks that are not killed; it needs no torchrun."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    ranks = finish_ranks(2, "train.py", *overrides(run_dir, STEPS, timeout_s=10.0))
    assert [rank.code for rank in ranks] == [0, 0], ranks
    return str(json.loads((run_dir / "result.json").read_text())["param_sha256"])


def test_a_run_whose_rank_is_killed_ends_with_the_same_model_and_whole_logs(
    tmp_path: Path, forked: Forked, undisturbed: str
) -> None:
    start = forked.torchrun(2, "--max-restarts=1")
    result, rows = run(start, tmp_path / "killed", [SAVED + 3], random.Random(), steps=STEPS)
    assert result["param_sha256"] == undisturbed, rows
    assert problems_of_logs(tmp_path / "killed" / "run", STEPS) == []


@pytest.mark.netns
def test_a_lost_host_leaves_the_rest_to_finish_with_the_same_batches(tmp_path: Path, forked: Forked) -> None:
    steps = 10 * STEPS  # the cable takes a moment to pull, on a busy machine 5 s
    with hosts(2) as pair:
        result, _ = lose(pair, tmp_path / "lost", "cut", steps=steps)
    assert (result["world_size"], result["steps"], result["samples_seen"]) == (2, steps, 64 * steps)
    assert problems_of_logs(tmp_path / "lost" / "run", steps) == []
