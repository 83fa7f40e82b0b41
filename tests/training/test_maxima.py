"""The numbers of each step that all ranks agree on: the same by an all-reduce and through shared memory."""

from __future__ import annotations

import math
import mmap
import random
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.runs import settings
from trainer.distributed.process_group import process_group
from trainer.faults import shown_numbers
from trainer.faults.heartbeat import Heartbeat
from trainer.faults.stacks import frames_of_exception, waits
from trainer.training.maxima import Maxima, MessageMaxima, SharedMemoryMaxima, SilentRankError, maxima_over

TURNS = 300


def numbers_of(rank: int, turn: int) -> tuple[float, tuple[float, ...]]:
    """A loss, not finite in some turns, and four numbers."""
    own = random.Random(f"{rank} {turn}")
    loss = own.choice([0.5, 0.5, math.nan, math.inf])
    return loss, (own.choice([0.0, 1.0, 2.0]), own.choice([0.0, 1.0]), own.uniform(-9, 9), -math.inf)


def expected(world_size: int, turn: int) -> list[float]:
    rows = [numbers_of(rank, turn) for rank in range(world_size)]
    first = max(0.0 if math.isfinite(loss) else rank + 1.0 for rank, (loss, _) in enumerate(rows))
    return [first, *(max(column) for column in zip(*(values for _, values in rows), strict=True))]


def take_turns(rank: int, maxima: Maxima) -> list[list[float]]:
    found, pauses = [], random.Random(rank)
    for turn in range(TURNS):
        loss, values = numbers_of(rank, turn)
        maxima.start(torch.tensor(loss), values)
        if pauses.random() < 0.05:
            time.sleep(0.002)  # one rank is ahead, then the other
        found.append(list(maxima.finish()))
    return found


def over(kind: type, world_size: int) -> None:
    with process_group(settings().distributed) as dist:
        chosen = maxima_over(dist)
        assert isinstance(chosen, SharedMemoryMaxima)
        maxima = chosen if kind is SharedMemoryMaxima else MessageMaxima(dist.rank)
        found = take_turns(dist.rank, maxima)
        for turn, numbers in enumerate(found):
            assert numbers == pytest.approx(expected(world_size, turn)), turn


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.slow
def test_each_rank_has_the_largest_of_all(world_size: int) -> None:
    kinds = [SharedMemoryMaxima] if world_size == 1 else [SharedMemoryMaxima, MessageMaxima]
    for kind in kinds:
        run_ranks(over, world_size, kind, world_size, init=False)


def one_cannot_read() -> None:
    with process_group(settings().distributed) as dist:
        if dist.rank == 1 and dist.watch is not None:
            dist.watch._here.pop(0)  # as in another container
        assert isinstance(maxima_over(dist), MessageMaxima)


def test_if_a_rank_cannot_read_the_others_memory_none_does() -> None:
    run_ranks(one_cannot_read, 2, init=False)


def shared(others: dict[int, Heartbeat], timeout_s: float) -> SharedMemoryMaxima:
    dist: Any = SimpleNamespace(rank=0, heartbeat=Heartbeat(), watch=SimpleNamespace(timeout_s=timeout_s))
    return SharedMemoryMaxima(dist, {rank: heartbeat.records() for rank, heartbeat in others.items()})


def test_a_rank_that_shows_nothing_is_named() -> None:
    others = {1: Heartbeat(), 2: Heartbeat()}
    maxima = shared(others, timeout_s=0.2)
    maxima.start(torch.zeros(()), (0.0,) * 4)
    others[1].show((0.0,) * 5)
    with pytest.raises(
        SilentRankError, match=r"rank 2 has not agreed on the next update within 0\.2 s"
    ) as caught:
        maxima.finish()
    assert caught.value.peer == 2


def test_a_rank_that_waits_for_the_numbers_of_others_counts_as_waiting() -> None:
    """Otherwise it counts as busy, like the rank that hangs."""
    maxima = shared({1: Heartbeat()}, timeout_s=0.05)
    maxima.start(torch.zeros(()), (0.0,) * 4)
    with pytest.raises(SilentRankError) as caught:
        maxima.finish()
    assert waits(frames_of_exception(caught.value))


def test_the_numbers_of_the_turn_before_do_not_count() -> None:
    others = {1: Heartbeat()}
    maxima = shared(others, timeout_s=0.1)
    others[1].show((7.0,) * 5)
    for answer in ([7.0] * 5, None):
        maxima.start(torch.zeros(()), (0.0,) * 4)
        if answer is None:
            with pytest.raises(SilentRankError):
                maxima.finish()
        else:
            assert maxima.finish() == answer


def test_a_second_run_in_the_same_group_is_not_answered_by_the_first() -> None:
    other = Heartbeat()
    first = shared({1: other}, timeout_s=0.1)
    for _ in range(3):
        first.start(torch.zeros(()), (0.0,) * 4)
        other.show((7.0,) * 5)
        assert first.finish() == [7.0] * 5
    dist: Any = SimpleNamespace(rank=0, heartbeat=first._heartbeat, watch=SimpleNamespace(timeout_s=0.1))
    second = SharedMemoryMaxima(dist, {1: other.records()})
    second.start(torch.zeros(()), (0.0,) * 4)
    with pytest.raises(SilentRankError):
        second.finish()
    other.show((8.0,) * 5)
    assert second.finish() == [8.0] * 5


def test_numbers_that_are_not_whole_are_not_read() -> None:
    memory = mmap.mmap(-1, shown_numbers.SIZE)
    assert shown_numbers.read(memory, 0, 0) is None  # nothing was ever shown
    shown_numbers.write(memory, 0, 2, (1.0, 2.0, 3.0, 4.0, 5.0))
    assert shown_numbers.read(memory, 0, 2) == (1.0, 2.0, 3.0, 4.0, 5.0)
    for byte in range(52):  # turn, numbers, checksum
        memory[byte] ^= 1
        assert shown_numbers.read(memory, 0, 2) is None
        memory[byte] ^= 1
