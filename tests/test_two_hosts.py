"""Two hosts, which are network namespaces: the command from the README, and a lost host."""

import contextlib
import json
import re
import time
from pathlib import Path

import pytest

from tests.failure_parts import inject
from tests.forked import Forked
from tests.hosts import hosts
from tests.programs import started_ranks

pytestmark = [pytest.mark.slow, pytest.mark.netns]
QUICK = ("train.max_steps=11", "train.log_every_steps=10", "model.hidden=[32]")


def test_torchrun_on_two_hosts_makes_one_run(tmp_path: Path) -> None:
    with hosts(2) as pair, contextlib.ExitStack() as stack:
        start, environment = Forked(stack).on_hosts(pair, 2), {"OMP_NUM_THREADS": "1"}
        options = ["strategy=fsdp", "strategy.shard_group=host", f"run_dir={tmp_path}/run", *QUICK]
        launchers = start(options, environment, tmp_path)
        ended = [launcher.wait(200) for launcher in launchers]
    first, second = (tmp_path / f"output{host}" for host in (0, 1))
    assert ended == [0, 0], first.read_text() + second.read_text()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["world_size"], result["steps"]) == (4, 11)
    assert "processes  4 on 2 hosts" in first.read_text()
    said = second.read_text()
    assert said.count("\n") == 0 or "strategy" not in said, "one voice, that of rank 0"
    assert len(list((tmp_path / "run").glob("events.*"))) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"run", "output0", "output1"}


TIMEOUT_S = 5
LONG = (
    "train.epochs=100000",
    "model.hidden=[32]",
    "checkpoint.every_epochs=null",
    "train.eval_every_epochs=0",
)


def test_a_cut_link_is_named_on_both_sides_and_all_ranks_end(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = [*LONG, f"run_dir={run_dir}", f"distributed.timeout_s={TIMEOUT_S}"]
    with hosts(2) as (one, other):
        command = f"ip -n {other.switch} link set {other.port} down"
        options += inject("cut", 2, 10, "backward", mark=run_dir / "fault.json", command=command)
        with started_ranks([one, one, other, other], "train.py", *options) as ranks:
            deadline = time.monotonic() + 200
            while not (run_dir / "fault.json").exists():
                assert time.monotonic() < deadline, "\n".join(rank.stdout + rank.stderr for rank in ranks)
                time.sleep(0.05)
            # The report comes TIMEOUT_S after the last sign of progress; the rest is for a busy machine.
            deadline = time.monotonic() + TIMEOUT_S + 60
            ended = [rank.wait(max(0.0, deadline - time.monotonic())) for rank in ranks]
            gone = time.time()
    cut = json.loads((run_dir / "fault.json").read_text())["time"]
    report_s = (run_dir / "failure.json").stat().st_mtime - cut
    print(f"report after {report_s:.1f} s, all gone after {gone - cut:.1f} s")
    assert [rank.code for rank in ended] == [1] * 4
    for side, far, lost in ((ended[:2], 1, "rank 2, rank 3"), (ended[2:], 0, "rank 0, rank 1")):
        output = "".join(rank.output for rank in side)
        assert (
            len(re.findall(rf"host {far} \(.*\) with {lost}: down or disconnected, no report for", output))
            == 1
        ), output
    assert json.loads((run_dir / "failure.json").read_text())["kind"] == "lost"
