"""torchrun on two hosts, each a network namespace: the command of the README, and a host that is lost."""

import json
import time
from pathlib import Path

import pytest

from tests.hosts import hosts, torchrun_on

pytestmark = [pytest.mark.slow, pytest.mark.netns]
QUICK = ("train.epochs=3", "train.log_every_steps=10", "model.hidden=[32]")


@pytest.mark.parametrize("shard_group", ["world", "host"])
def test_two_hosts_make_one_run(shard_group: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = ("strategy=fsdp", f"strategy.shard_group={shard_group}", f"run_dir={run_dir}", *QUICK)
    with hosts(2) as pair, torchrun_on(pair, 2, "train.py", *options) as job:
        first, second = job.succeed(timeout_s=100)
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["world_size"], result["steps"]) == (4, 66)
    assert "2 x 2 processes" in first
    assert second.count("\n") == 0 or "strategy" not in second, "one voice, that of rank 0"
    assert len(list((run_dir / "tensorboard").iterdir())) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_lost_host_is_named(tmp_path: Path) -> None:
    options = ("train.epochs=100000", "distributed.timeout_s=5", f"run_dir={tmp_path}", "model.hidden=[32]")
    options += ("checkpoint.every_epochs=null",)  # whose deadline is a longer one
    with hosts(2) as pair, torchrun_on(pair, 2, "train.py", *options) as job:
        log = tmp_path / "train.log"
        deadline = time.monotonic() + 60
        while not (log.exists() and " step 50/" in log.read_text()):
            assert time.monotonic() < deadline, "it never trained"
            time.sleep(0.2)
        pair[1].link_down()
        # torchrun on the host that is cut off waits longer, for the rendezvous that lives on the other one.
        code = job.agents[0].wait(60)
        output = job.outputs()[0]
    assert code != 0
    assert "no sign of rank 2 (host 1), rank 3 (host 1)" in output
