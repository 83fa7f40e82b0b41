"""Norms of sharded gradients equal torch's to the bit, and their cost is linear in their number."""

import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.ranks import run_ranks
from trainer.gradient_norm import gradient_norm, scale_down
from trainer.local_shard import to_local


def _parameters(rows: list[int], hybrid: bool) -> list[nn.Parameter]:
    """With gradients; the second rank has nothing of a single row."""
    generator = torch.Generator().manual_seed(0)
    names = ("replicate", "shard") if hybrid else ("shard",)
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]] if hybrid else [0, 1, 2, 3], mesh_dim_names=names)
    placements = [Replicate()] * hybrid + [Shard(0)]
    found = []
    for number in rows:
        whole = torch.randn(number, 3, generator=generator) * number
        parameter = nn.Parameter(distribute_tensor(torch.zeros(number, 3), mesh, placements))
        parameter.grad = distribute_tensor(whole, mesh, placements)
        found.append(parameter)
    return found


def _norms(hybrid: bool) -> dict[str, Any]:
    ours, theirs = (_parameters([1, 2, 3, 7, 8], hybrid) for _ in range(2))
    norm = gradient_norm(ours)
    right = nn.utils.get_total_norm([p.grad for p in theirs if p.grad is not None])
    assert isinstance(right, DTensor)
    found: dict[str, Any] = {"norm": norm, "right": right.full_tensor(), "shards": []}
    for max_norm in (1e6, 1.0):
        scale_down(ours, max_norm, norm)
        nn.utils.clip_grads_with_norm_(theirs, max_norm, right.full_tensor())
        pairs = zip(ours, theirs, strict=True)
        found["shards"] += [(to_local(a.grad), to_local(b.grad)) for a, b in pairs]  # type: ignore[arg-type]
    return found


def _calls(number: int) -> int:
    parameters, events = _parameters([4] * number, hybrid=False), list[str]()
    sys.setprofile(lambda frame, event, argument: events.append(event))
    scale_down(parameters, 1.0, gradient_norm(parameters))
    sys.setprofile(None)
    return sum(event.endswith("call") for event in events)


def _both() -> tuple[list[dict[str, Any]], list[int]]:
    return [_norms(hybrid) for hybrid in (False, True)], [_calls(number) for number in (4, 50, 200)]


def test_norms_of_shards() -> None:
    for found, (_, few, many) in run_ranks(_both, 4):
        for each in found:
            assert each["norm"].equal(each["right"]) and each["norm"] > 10
            assert all(ours.equal(theirs) for ours, theirs in each["shards"])
        assert many < 4.5 * few
