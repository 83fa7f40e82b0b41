"""Seeds of ranks and micro-batches, and generators that are restored."""

import random

import numpy as np
import pytest
import torch

from trainer.tensors import generators


def _draw() -> list[float]:
    normal = [random.gauss(0, 1), float(np.random.standard_normal())]  # both keep a second number for later
    return [random.random(), float(np.random.rand()), torch.rand(1).item(), torch.randn(1).item(), *normal]


def test_each_rank_and_seed_draws_different_numbers() -> None:
    draws = []
    for seed in (0, 1, 2):
        for rank in (0, 1, 2):
            generators.seed_everything(seed, rank)
            draws.append(tuple(_draw()))
            generators.seed_everything(seed, rank)
            assert tuple(_draw()) == draws[-1]
    for drawn in range(len(draws[0])):
        assert len({draw[drawn] for draw in draws}) == len(draws)


def test_random_numbers_of_a_micro_batch_depend_only_on_the_three_arguments() -> None:
    draws = []
    for numbers in ((0, 1, 2), (0, 1, 3), (0, 2, 1), (1, 1, 2), (0, -1, 2), (2**63, 11, 2), (2**63, 1, 12)):
        generators.seed_micro_batch(*numbers)
        draws.append(tuple(_draw()))
        generators.seed_everything(7, 7)
        generators.seed_micro_batch(*numbers)
        assert tuple(_draw()) == draws[-1]
    for drawn in range(len(draws[0])):
        assert len({draw[drawn] for draw in draws}) == len(draws)


def test_generators_are_restored() -> None:
    generators.seed_everything(3, 1)
    _draw()
    with generators.generators_kept():
        expected = [_draw() for _ in range(3)]
    with pytest.raises(ValueError, match="within"), generators.generators_kept():
        generators.seed_everything(4, 0)
        raise ValueError("within")
    assert [_draw() for _ in range(3)] == expected


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_generators_of_cuda_are_seeded_and_restored() -> None:
    device = torch.device("cuda", 0)
    generators.seed_micro_batch(3, 1, 0, [device])
    with generators.generators_kept():
        expected = torch.rand(5, device=device)
    assert torch.equal(torch.rand(5, device=device), expected)
    generators.seed_micro_batch(3, 1, 0, [device])
    assert torch.equal(torch.rand(5, device=device), expected)
    generators.seed_micro_batch(3, 1, 1, [device])
    assert not torch.equal(torch.rand(5, device=device), expected)
