"""Seeds and the state of the generators."""

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from trainer.checkpoint.tree import put_together, take_apart
from trainer.distributed import seeding


def _draw() -> list[float]:
    normal = [random.gauss(0, 1), float(np.random.standard_normal())]  # both keep a second number for later
    return [random.random(), float(np.random.rand()), torch.rand(1).item(), torch.randn(1).item(), *normal]


def test_each_rank_and_seed_draws_other_numbers() -> None:
    draws = []
    for seed in (0, 1, 2):
        for rank in (0, 1, 2):
            seeding.seed_everything(seed, rank)
            draws.append(tuple(_draw()))
            seeding.seed_everything(seed, rank)
            assert tuple(_draw()) == draws[-1]
    for generator in range(len(draws[0])):
        assert len({draw[generator] for draw in draws}) == len(draws)


def test_state_comes_back_through_json_and_tensors() -> None:
    seeding.seed_everything(3, 1)
    _draw()
    tensors, plain = take_apart(seeding.rng_state())
    expected = [_draw() for _ in range(3)]
    seeding.seed_everything(4, 0)
    restored: dict[str, Any] = put_together(json.loads(json.dumps(plain)), tensors)
    seeding.set_rng_state(restored)
    assert [_draw() for _ in range(3)] == expected


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_state_comes_back() -> None:
    seeding.seed_everything(3, 1)
    torch.rand(5, device="cuda")
    state = seeding.rng_state()
    expected = torch.rand(5, device="cuda")
    torch.rand(5, device="cuda")
    seeding.set_rng_state(state)
    assert torch.equal(torch.rand(5, device="cuda"), expected)
