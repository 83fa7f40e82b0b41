"""A model shared by some of the ranks: its gradients are theirs alone, and no other rank is needed."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import run_ranks
from trainer.comm.algorithms.all_reduce import ALGORITHMS
from trainer.comm.ddp_hook import attach
from trainer.comm.transport.blame import CommError


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


def lose_a_member(told: str) -> tuple[str, int]:
    rank = dist.get_rank()
    if rank < 2:
        return "", -1
    model = linear([2, 3])
    hook = attach(model, "ring", hosts=[0, 0], timeout_s=2.0)  # of the group's ranks alone
    for _ in range(2):  # before its second forward pass DDP asks all ranks how to lay out its buckets
        gradient(model, 1.0)
    if rank == 3:
        while not Path(told).exists():
            time.sleep(0.05)
        return "", -1
    with pytest.raises(CommError) as error, hook.plain_errors():
        gradient(model, 1.0)
    Path(told).touch()
    return str(error.value), error.value.peer


@pytest.mark.slow
def test_a_lost_member_has_its_name_in_the_world(tmp_path: Path) -> None:
    message, peer = run_ranks(lose_a_member, 4, str(tmp_path / "told"))[2]
    assert peer == 3 and "stopped at rank 2 on host" in message and ": rank 3 on host" in message


def uneven(algorithm: str) -> list[float]:
    """Rank r has 2 + r batches; the gradient at each."""
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    hook = attach(model, algorithm, hosts=[0, 0, 0], timeout_s=20.0)
    with pytest.raises(ValueError, match=r"divide_by_initial_world_size=False.*leave the argument out"):
        model.join(divide_by_initial_world_size=False)
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
