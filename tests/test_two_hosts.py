"""Two hosts, each a network namespace: the command of the README, and a host that is lost."""

import contextlib
import json
import re
import time
from pathlib import Path

import pytest

from tests.fault_parts import fault
from tests.forked import Forked
from tests.hosts import hosts
from tests.programs import finish_ranks, started_ranks

pytestmark = [pytest.mark.slow, pytest.mark.netns]
QUICK = ("train.max_steps=11", "train.log_every_steps=10", "model.hidden=[32]")


def options(shard_group: str, run_dir: Path) -> list[str]:
    return ["strategy=fsdp", f"strategy.shard_group={shard_group}", f"run_dir={run_dir}", *QUICK]


def assert_one_run(run_dir: Path, first: str, second: str) -> None:
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["world_size"], result["steps"]) == (4, 11)
    assert "2 x 2 processes" in first
    assert second.count("\n") == 0 or "strategy" not in second, "one voice, that of rank 0"
    assert len(list((run_dir / "tensorboard").iterdir())) == 1


def test_torchrun_on_two_hosts_makes_one_run(tmp_path: Path) -> None:
    with hosts(2) as pair, contextlib.ExitStack() as stack:
        start, environment = Forked(stack).on(pair, 2), {"OMP_NUM_THREADS": "1"}
        launchers = start(options("host", tmp_path / "run"), environment, tmp_path)
        ended = [launcher.wait(200) for launcher in launchers]
    first, second = (tmp_path / f"output{host}" for host in (0, 1))
    assert ended == [0, 0], first.read_text() + second.read_text()
    assert_one_run(tmp_path / "run", first.read_text(), second.read_text())
    assert {path.name for path in tmp_path.iterdir()} == {"run", "output0", "output1"}


def test_two_hosts_make_one_run(tmp_path: Path) -> None:
    with hosts(2) as (one, other):
        where = [one, one, other, other]
        ranks = finish_ranks(where, "train.py", *options("world", tmp_path))
    assert [rank.code for rank in ranks] == [0] * 4, ranks
    assert_one_run(tmp_path, ranks[0].output, "".join(rank.output for rank in ranks[1:]))


def test_a_slow_link_changes_no_bit(tmp_path: Path) -> None:
    hashes = []
    for rate in ("10mbit", None):
        run_dir = tmp_path / str(rate)
        options = ["train.max_steps=8", "train.eval_every_epochs=0", "comm=ring", f"run_dir={run_dir}"]
        with hosts(2, rate) as pair:
            ranks = finish_ranks(pair, "train.py", *options, "distributed.timeout_s=20")
        assert [rank.code for rank in ranks] == [0, 0], ranks
        hashes.append(json.loads((run_dir / "result.json").read_text())["param_sha256"])
    assert hashes[0] == hashes[1]


TIMEOUT_S = 8
LONG = (
    "train.epochs=100000",
    "model.hidden=[32]",
    "checkpoint.every_epochs=null",
    "train.eval_every_epochs=0",
)
CUTS = {
    "training": ("backward",),
    "evaluation": ("evaluate", "train.epochs=1", "train.eval_every_epochs=1"),
    "a full save": ("checkpoint", "checkpoint.every_steps=10"),
    "a sharded save": ("checkpoint", "checkpoint.every_steps=10", "checkpoint=sharded", "strategy=fsdp"),
    "set-up": ("",),
}  # fmt: skip


def cutting(where: str, run_dir: Path, command: str) -> list[str]:
    phase, *more = CUTS[where]
    options = [*LONG, f"run_dir={run_dir}", f"distributed.timeout_s={TIMEOUT_S}", *more]
    if where == "set-up":
        options.append("data.dataset._target_=tests.user_parts.CutsTheLink")
        return [*options, f"+data.dataset.command='{command}'", f"+data.dataset.mark={run_dir}/fault.json"]
    return [*options, *fault("cut", 2, 10, phase, mark=run_dir / "fault.json", command=command)]


@pytest.mark.parametrize("where", CUTS)
def test_a_cut_link_is_named_on_both_sides_and_no_rank_outlives_it(where: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with hosts(2) as (one, other):
        command = f"ip -n {other.switch} link set {other.port} down"
        options = cutting(where, run_dir, command)
        with started_ranks([one, one, other, other], "train.py", *options) as ranks:
            deadline = time.monotonic() + 200
            while not (run_dir / "fault.json").exists():
                assert time.monotonic() < deadline, "\n".join(rank.stdout + rank.stderr for rank in ranks)
                time.sleep(0.05)
            # The verdict comes TIMEOUT_S after the last sign of progress; the rest is for a busy machine.
            deadline = time.monotonic() + TIMEOUT_S + 60
            ended = [rank.wait(max(0.0, deadline - time.monotonic())) for rank in ranks]
            gone = time.time()
    cut = json.loads((run_dir / "fault.json").read_text())["time"]
    verdict_s = (run_dir / "failure.json").stat().st_mtime - cut
    print(f"{where}: verdict after {verdict_s:.1f} s, all gone after {gone - cut:.1f} s")
    assert [rank.code for rank in ended] == [1] * 4
    for side, far, lost in ((ended[:2], 1, "rank 2, rank 3"), (ended[2:], 0, "rank 0, rank 1")):
        output = "".join(rank.output for rank in side)
        assert len(re.findall(rf"host {far} \(.*\) with {lost}: not heard of for .* s", output)) == 1, output
    assert json.loads((run_dir / "failure.json").read_text())["kind"] == "lost"
