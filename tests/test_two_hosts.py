"""Two hosts, each a network namespace: the command of the README, and a host that is lost."""

import json
import re
import time
from pathlib import Path

import pytest

from tests.hosts import hosts, torchrun_on
from tests.programs import finish_ranks, started_ranks

pytestmark = [pytest.mark.slow, pytest.mark.netns]
QUICK = ("train.epochs=2", "train.log_every_steps=10", "model.hidden=[32]")


def options(shard_group: str, run_dir: Path) -> list[str]:
    return ["strategy=fsdp", f"strategy.shard_group={shard_group}", f"run_dir={run_dir}", *QUICK]


def assert_one_run(run_dir: Path, first: str, second: str) -> None:
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["world_size"], result["steps"]) == (4, 44)
    assert "2 x 2 processes" in first
    assert second.count("\n") == 0 or "strategy" not in second, "one voice, that of rank 0"
    assert len(list((run_dir / "tensorboard").iterdir())) == 1


def test_torchrun_on_two_hosts_makes_one_run(tmp_path: Path) -> None:
    with hosts(2) as pair, torchrun_on(pair, 2, "train.py", *options("host", tmp_path / "run")) as job:
        first, second = job.succeed(timeout_s=100)
    assert_one_run(tmp_path / "run", first, second)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_two_hosts_make_one_run(tmp_path: Path) -> None:
    with hosts(2) as (one, other):
        where = [one, one, other, other]
        ranks = finish_ranks(where, "train.py", *options("world", tmp_path), timeout_s=100)
    assert [rank.code for rank in ranks] == [0] * 4, ranks
    assert_one_run(tmp_path, ranks[0].output, "".join(rank.output for rank in ranks[1:]))


def test_a_cut_link_is_named_on_both_sides_and_no_rank_outlives_it(tmp_path: Path) -> None:
    timeout_s = 5
    command = ["train.py", "train.epochs=100000", f"distributed.timeout_s={timeout_s}", f"run_dir={tmp_path}"]
    command += ["model.hidden=[32]", "checkpoint.every_epochs=null"]
    with hosts(2) as (one, other), started_ranks([one, one, other, other], *command) as ranks:
        log = tmp_path / "train.log"
        deadline = time.monotonic() + 60
        while not (log.exists() and " step 50/" in log.read_text()):
            assert time.monotonic() < deadline, "it never trained"
            time.sleep(0.1)
        other.link_down()
        # The verdict comes timeout_s after the last sign of progress; the rest is for a busy machine.
        deadline = time.monotonic() + timeout_s + 15
        ended = [rank.wait(max(0.0, deadline - time.monotonic())) for rank in ranks]
    assert [rank.code for rank in ended] == [1] * 4
    for side, far, lost in ((ended[:2], 1, "rank 2, rank 3"), (ended[2:], 0, "rank 0, rank 1")):
        output = "".join(rank.output for rank in side)
        assert len(re.findall(rf"host {far} \(.*\) with {lost}: not heard of for .* s", output)) == 1, output
    assert json.loads((tmp_path / "failure.json").read_text())["kind"] == "lost"
