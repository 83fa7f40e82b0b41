"""Copies of shards on two hosts: the loss of either loses no step, and a cut link makes no second model."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.fault_parts import fault
from tests.faults.test_mirror import MIRRORED
from tests.faults.test_rescue import RUN, checkpoints, hash_of, message, start, undisturbed
from tests.hosts import Host, hosts
from tests.programs import Ended, finish_ranks
from tests.ranks import run_ranks
from trainer.checkpoint import exchange
from trainer.checkpoint.copies import CopyWriter, copies_in
from trainer.checkpoint.exchange import CopyExchange, receivers
from trainer.checkpoint.open_checkpoint import verified
from trainer.checkpoint.safetensors_files import ToStore
from trainer.comm.transport.blame import PeerError
from trainer.comm.transport.gloo import GlooLink
from trainer.distributed.agreement import gather_objects
from trainer.distributed.process_group import Dist
from trainer.faults.ending import Ending
from trainer.faults.heartbeat import Heartbeat
from trainer.faults.verdict import Observed, Verdict

PAIR = [0, 0, 1, 1]
WORLD_SIZE = len(PAIR)


def start_on(where: Sequence[int | Host], run_dir: Path, *overrides: str) -> list[Ended]:
    return finish_ranks(where, "train.py", *RUN, f"run_dir={run_dir}", *overrides)


def saved_steps(run_dir: Path) -> list[int]:
    """The steps of all checkpoints, each verified and of all shards.

    A second saver, of a rank that saw less, may be ended in the middle; the next start clears what it left.
    """
    whole = [name for name in checkpoints(run_dir) if name.startswith("step_")]
    found = [verified(run_dir / "checkpoints" / name) for name in whole]
    assert all(len(each.facts["places"]) == WORLD_SIZE for each in found)
    return [each.manifest.step for each in found]


def assert_goes_on(run_dir: Path, folder: Path, *overrides: str) -> None:
    """On one host, from the newest checkpoint, to the model of a run without a fault."""
    newest = max(saved_steps(run_dir))
    again = start(WORLD_SIZE, run_dir, *overrides)
    assert f"step_{newest:08d} at step" in again[0].output, again
    unharmed = [override for override in overrides if "mirror" not in override]
    assert hash_of(run_dir) == undisturbed(WORLD_SIZE, folder, *unharmed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(fault("kill", 3, 8, "update"), id="a rank of host 1, within the update"),
        pytest.param(fault("kill", 0, 8, "update", count=2), id="host 0, within the update"),
        pytest.param(fault("kill", 1, 8, "backward", count=2), id="a rank of each host"),
        pytest.param(fault("raise", 2, 8, "forward"), id="a rank of host 1 raises"),
    ],
)
def test_no_step_is_lost(how: tuple[str, ...], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ended = start_on(PAIR, run_dir, *MIRRORED, *how)
    assert 0 not in [rank.code for rank in ended], ended
    # The copies of step 7 may still be on their way when the forward pass of step 8 begins.
    assert saved_steps(run_dir) in ([7], [6]), ended
    assert_goes_on(run_dir, tmp_path, *MIRRORED)


def host_0_killed(where: list[int], tmp_path: Path, *overrides: str) -> tuple[Path, list[Ended]]:
    """A run on the hosts `where` of which all ranks of host 0 are killed at once: its directory, and its ranks' ends."""
    for attempt in range(3):
        run_dir = tmp_path / f"run {attempt}"
        how = fault("kill", 0, 8, "backward", count=where.count(0))
        ended = start_on(where, run_dir, *overrides, *how)
        if "saves the last step" not in message(run_dir):
            break  # else, on a busy machine, the verdict came before all were dead, and asked one of them
    return run_dir, ended


@pytest.mark.slow
def test_hosts_may_have_different_numbers_of_ranks(tmp_path: Path) -> None:
    run_dir, ended = host_0_killed([0, 0, 0, 1], tmp_path, *MIRRORED)
    assert saved_steps(run_dir) in ([7], [6]), ended  # the copies of step 7 may still be on their way
    assert_goes_on(run_dir, tmp_path, *MIRRORED)


@pytest.mark.slow
def test_under_hybrid_each_host_has_all(tmp_path: Path) -> None:
    hybrid = (*MIRRORED, "strategy.shard_group=host")
    run_dir, _ = host_0_killed(PAIR, tmp_path, *hybrid)
    assert checkpoints(run_dir) == ["step_00000007"], message(run_dir)
    assert len(verified(run_dir / "checkpoints" / "step_00000007").facts["places"]) == WORLD_SIZE
    again = start_on(PAIR, run_dir, *hybrid)
    assert "step_00000007 at step" in again[0].output
    assert start_on(PAIR, tmp_path / "undisturbed", *hybrid)[0].code == 0
    assert hash_of(run_dir) == hash_of(tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.parametrize("rate", [None, "50mbit"])
def test_without_the_host_of_the_store_the_other_saves(rate: str | None, tmp_path: Path) -> None:
    """On a slow link a copy takes some steps' time: faults come while it is on its way."""
    run_dir, wide = tmp_path / "run", ("+model.width=20000",)
    with hosts(2, rate) as (one, other):
        ended = start_on(
            [one, one, other, other], run_dir, *MIRRORED, *wide, *fault("kill", 0, 8, "forward", count=2)
        )
    (step,) = saved_steps(run_dir)
    assert step in (6, 7), ended
    assert f"step {step} is saved, by rank " in message(run_dir)
    assert_goes_on(run_dir, tmp_path, *MIRRORED, *wide)


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.parametrize("phase", ["forward", "optimizer"])
def test_behind_a_cut_link_both_sides_have_one_model(phase: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with hosts(2) as (one, other):
        cut = f"ip -n {other.switch} link set {other.port} down"
        how = fault("cut", 2, 8, phase, command=cut)
        ended = start_on([one, one, other, other], run_dir, *MIRRORED, *how, "distributed.timeout_s=8")
    steps = saved_steps(run_dir)
    assert steps and len(set(steps)) == len(steps) and set(steps) <= {6, 7, 8}, ended
    for side in (ended[:2], ended[2:]):
        assert "not heard of for" in "".join(rank.output for rank in side)
    assert_goes_on(run_dir, tmp_path, *MIRRORED)


@pytest.mark.parametrize(("any_side", "saver"), [(True, 1), (False, None)])
def test_without_an_answer_of_the_store_only_copies_are_saved(any_side: bool, saver: int | None) -> None:
    def here(rank: int) -> Any:
        return SimpleNamespace(observe=lambda: Observed(rank, 0, "h", rank, finished=7 + rank), member=None)

    members: Any = [SimpleNamespace(rank=rank, host=rank // 2, attempt=0) for rank in range(4)]
    ending: Any = Ending(Heartbeat(), 0, members, {}, None, 5.0, lambda: None)
    ending._here = {0: here(0), 1: here(1)}
    ending.reports = SimpleNamespace(agree=lambda verdict, timeout_s: None)
    ending.rescue.last_step = SimpleNamespace(any_side=any_side)
    assert ending._agreed(Verdict((2, 3), "lost", 1, "host 1 is lost", saver=0)).saver == saver


@pytest.mark.slow
def test_three_hosts_are_refused(tmp_path: Path) -> None:
    ended = start_on([0, 1, 2], tmp_path, *MIRRORED)
    words = "a copy of the model is sharded over 3 hosts, and shards are copied between two at most; set "
    assert [rank.code for rank in ended] == [2] * 3 and words in ended[0].output, ended


def test_each_rank_sends_to_one_of_the_other_host() -> None:
    assert receivers([0, 1, 2, 3], (0, 0, 1, 1)) == {0: 2, 1: 3, 2: 0, 3: 1}
    assert receivers([4, 5, 6, 7], (0, 1, 2, 3, 7, 7, 7, 5)) == {4: 7, 5: 7, 6: 7, 7: 4}


def part(rank: int, host: int, timeout_s: float = 20.0) -> tuple[CopyWriter, CopyExchange]:
    """One of two ranks on two hosts, and its exchange."""
    writer, group = CopyWriter(torch.device("cpu")), dist.new_group(backend="gloo")
    here = Dist(rank, 0, 2, 1, (0, 1), torch.device("cpu"), "gloo")
    return writer, CopyExchange(here, writer.memory, [0, 1], group, timeout_s)


def write(writer: CopyWriter, step: int, value: Tensor) -> None:
    stored = ToStore("x", value.dtype, tuple(value.shape), (value,))
    writer.write(step % 2, step, {"some.safetensors": [stored]}, f'{{"of": {step}}}')


def exchanged() -> list[tuple[int, bool]]:
    """Steps of the other's copies here, and whether they are whole, after exchanges of growing copies."""
    exchange._CHUNK_BYTES = 1000
    rank = dist.get_rank()
    writer, link = part(rank, rank)
    for step, size in enumerate((3000, 3000, 100, 20_000, 20_000), start=1):
        link.wait()
        write(writer, step, torch.full((size + 500 * rank,), 10.0 * step + rank))
        link.begin(step % 2, step)
    link.wait()
    link.close()
    found = []
    for step, copy in copies_in(link.received[1 - rank].fd).items():
        data = torch.full((20_500 - 500 * rank,), 10.0 * step + 1 - rank).numpy().tobytes()
        is_whole = copy.facts == {"of": step} and bytes(copy.files["some.safetensors"]).endswith(data)
        found.append((step, is_whole))
    return sorted(found)


def test_copies_are_exchanged_whole() -> None:
    assert run_ranks(exchanged, 2) == [[(4, True), (5, True)]] * 2


def late() -> list[int]:
    """Steps that the other has of this rank's when the wait of this one is over; the other is late."""
    rank = dist.get_rank()
    writer, link = part(rank, rank)
    told = gather_objects((os.getpid(), link.received[1 - rank].fd))
    pid, fd = told[1 - rank]
    theirs = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
    if rank == 1:
        move = link._move

        def slow(*arguments: Any) -> None:
            move(*arguments)
            time.sleep(0.5)

        link._move = slow  # type: ignore[method-assign]
    write(writer, 1, torch.ones(10))
    link.begin(1, 1)
    link.wait()
    found = sorted(copies_in(theirs))
    dist.barrier()
    return found


@pytest.mark.slow
def test_a_wait_ends_when_the_other_host_has_the_copies() -> None:
    assert run_ranks(late, 2) == [[1], [1]]


def cut_off() -> tuple[list[int], int]:
    """Steps of the other's copies after an exchange of which a part came, and who is blamed."""
    exchange._CHUNK_BYTES = 1000
    rank = dist.get_rank()
    writer, link = part(rank, rank, timeout_s=2.0)
    sends, send = [0], GlooLink.send

    def some(self: GlooLink, tensor: Tensor, tag: int) -> dist.Work:
        sends[0] += 1
        if rank == 1 and sends[0] == 14:  # of the third exchange, each of which has a head and 5 parts
            time.sleep(4.0)
        return send(self, tensor, tag)

    GlooLink.send = some  # type: ignore[method-assign]
    for step in (1, 2, 3):
        link.wait()
        write(writer, step, torch.full((1000,), float(step)))
        link.begin(step % 2, step)
    try:
        link.wait()
    except PeerError as error:
        blamed = error.peer
    else:
        blamed = -1
    return sorted(copies_in(link.received[1 - rank].fd)), blamed


@pytest.mark.slow
def test_half_a_copy_does_not_count() -> None:
    (steps, blamed), _ = run_ranks(cut_off, 2)
    assert (steps, blamed) == ([2], 1)
