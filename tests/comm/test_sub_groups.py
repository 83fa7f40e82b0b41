"""A model shared by some of the ranks: its gradients are theirs alone, and no other rank is needed."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import run_ranks
from trainer.comm.algorithms.all_reduce import ALGORITHMS
from trainer.comm.ddp_hook import attach


def linear(members: list[int]) -> DistributedDataParallel:
    """A model of two weights with its input as gradients; shared by `members`, which call this."""
    group = dist.new_group(members, use_local_synchronization=True)
    return DistributedDataParallel(nn.Linear(2, 1, bias=False), process_group=group)


def gradient(model: DistributedDataParallel, value: float) -> list[float]:
    model.zero_grad()
    model(torch.full((1, 2), value)).sum().backward()
    assert model.module.weight.grad is not None
    return model.module.weight.grad.flatten().tolist()


def train_side_by_side(groups: list[list[int]], hosts: list[int]) -> dict[str, Any]:
    """Each group has its own model and hook at the same time; a rank outside all groups has none."""
    rank = dist.get_rank()
    members = next((group for group in groups if rank in group), None)
    found: dict[str, Any] = {}
    if members is not None:
        model = linear(members)
        for algorithm in ("native", *ALGORITHMS):
            model = DistributedDataParallel(model.module, process_group=model.process_group)
            hook = attach(model, algorithm, hosts=hosts, timeout_s=20.0)
            found[algorithm] = [gradient(model, 10.0**rank) for _ in range(2)][-1]
            metrics = hook.timeline.metrics()
            assert metrics["comm/last_rank"] in members
            hook.close()
    dist.barrier()
    return found


def test_gradients_are_the_mean_over_the_models_own_ranks() -> None:
    groups, hosts = [[1], [0, 3]], [0, 0, 0, 1]
    for rank, found in enumerate(run_ranks(train_side_by_side, 4, groups, hosts)):
        members = next((group for group in groups if rank in group), [])
        for algorithm, mean in found.items():
            assert mean == pytest.approx([sum(10.0**r for r in members) / len(members)] * 2), algorithm
        assert bool(found) == bool(members)


def uneven(algorithm: str) -> list[float]:
    """Rank r has 2 + r batches; the gradient at each."""
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    hook = attach(model, algorithm, hosts=[0, 0, 0], timeout_s=20.0)
    with model.join():
        found = [gradient(model, 10.0 ** dist.get_rank())[0] for _ in range(2 + dist.get_rank())]
    hook.close()
    return found


@pytest.mark.parametrize("algorithm", [pytest.param("native", marks=pytest.mark.slow), "ring"])
def test_join_counts_ranks_that_have_no_more_data(algorithm: str) -> None:
    everyone = 111 / 3
    expected = [everyone, everyone, 110 / 3, 100 / 3]
    for rank, found in enumerate(run_ranks(uneven, 3, algorithm)):
        assert found == pytest.approx(expected[: 2 + rank])
