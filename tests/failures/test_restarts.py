"""torchrun --max-restarts with resume=auto: the run ends like an uninterrupted run.

benchmarks/restarts.py tests many more kills.
"""

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
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the hash of the same run on two ranks that are not killed, without torchrun."""
    run_dir = tmp_path_factory.mktemp("uninterrupted")
    ranks = finish_ranks(2, "train.py", *overrides(run_dir, STEPS, timeout_s=10.0))
    assert [rank.code for rank in ranks] == [0, 0], ranks
    return str(json.loads((run_dir / "result.json").read_text())["param_sha256"])


def test_a_run_with_a_killed_rank_ends_with_the_same_model_and_complete_logs(
    tmp_path: Path, forked: Forked, uninterrupted: str
) -> None:
    start = forked.torchrun(2, "--max-restarts=1")
    result, rows = run(start, tmp_path / "killed", [SAVED + 3], random.Random(), steps=STEPS)
    assert result["param_sha256"] == uninterrupted, rows
    assert problems_of_logs(tmp_path / "killed" / "run", STEPS) == []


@pytest.mark.netns
def test_after_the_loss_of_a_host_the_run_finishes_with_the_same_batches(
    tmp_path: Path, forked: Forked
) -> None:
    steps = 10 * STEPS  # cutting the link takes up to 5 s on a busy machine
    with hosts(2) as pair:
        result, _ = lose(pair, tmp_path / "lost", "cut", steps=steps)
    assert (result["world_size"], result["steps"], result["samples_seen"]) == (2, steps, 64 * steps)
    assert problems_of_logs(tmp_path / "lost" / "run", steps) == []
