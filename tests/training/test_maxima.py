"""The numbers of each step that all ranks agree on."""

from __future__ import annotations

import math
import random
import time

import pytest
import torch

from tests.ranks import run_ranks
from tests.runs import settings
from trainer.distributed.process_group import process_group
from trainer.training.maxima import Maxima, maxima_over

TURNS = 100


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


def over_all(world_size: int) -> None:
    with process_group(settings().distributed) as dist:
        for turn, numbers in enumerate(take_turns(dist.rank, maxima_over(dist))):
            assert numbers == pytest.approx(expected(world_size, turn)), turn


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_rank_has_the_largest_of_all(world_size: int) -> None:
    run_ranks(over_all, world_size, world_size, init=False)
