"""Owners get the mean of all workers' gradients, and all ranks get the owners' values."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from trainer.comm.parameter_server import Exchange, owners
from trainer.distributed.collectives import gloo_group

SHAPES = {"a": (7, 5), "b": (2,), "c": (4, 3), "scale": (), "half": (3,)}


def parameters(start: float = 0.0) -> dict[str, nn.Parameter]:
    made = {name: torch.full(shape, start + number) for number, (name, shape) in enumerate(SHAPES.items())}
    made["half"] = made["half"].half()
    return {name: nn.Parameter(value) for name, value in made.items()}


@pytest.mark.parametrize("servers", [1, 2, 8])
def test_the_largest_parameters_go_to_the_least_loaded_server(servers: int) -> None:
    named = parameters()
    owner = owners(list(named.values()), range(servers))
    held = [sum(p.nbytes for p, server in owner.items() if server == number) for number in range(servers)]
    assert sum(held) == sum(p.nbytes for p in named.values())
    assert max(held) == (sum(held) if servers == 1 else named["a"].nbytes), "which is more than the others"


def exchanged(servers: list[int], workers: list[int], bucket_bytes: int) -> dict[str, Any]:
    """Make a step in which `b` has no gradient, `c` one only on the last worker, and an owner adds 100."""
    rank = torch.distributed.get_rank()
    named = parameters(rank * 1000.0)
    exchange = Exchange(list(named.values()), servers, workers, rank, gloo_group(30.0), bucket_bytes)
    if rank in workers:
        for name, parameter in named.items():
            if name != "b" and (name != "c" or rank == workers[-1]):
                parameter.grad = torch.full_like(parameter, float(rank + 1))
    exchange.push()
    gradients = {n: float(p.grad.float().mean()) for n, p in named.items() if p.grad is not None}
    with torch.no_grad():
        for own in exchange.owned.get(rank, ()):
            own += 100
    exchange.pull()
    values = {name: parameter.float().unique().tolist() for name, parameter in named.items()}
    formula = exchange.bytes_of(rank) if rank in servers else 0
    return {"gradients": gradients, "values": values, "moved": exchange.moved, "formula": formula}


@pytest.mark.parametrize(
    ("servers", "workers", "bucket_bytes"),
    [([0], [1, 2], 1 << 20), pytest.param([0, 1, 2], [0, 1, 2], 1, marks=pytest.mark.slow)],
)
def test_a_step_and_its_traffic(servers: list[int], workers: list[int], bucket_bytes: int) -> None:
    ranks = run_ranks(exchanged, 3, servers, workers, bucket_bytes)
    named = parameters()
    owner = owners(list(named.values()), servers)
    by_name = {name: owner[parameter] for name, parameter in named.items()}
    mean = sum(worker + 1 for worker in workers) / len(workers)
    expected = {"a": mean, "scale": mean, "half": mean, "c": (workers[-1] + 1) / len(workers)}
    for rank, found in enumerate(ranks):
        own = {name: value for name, value in expected.items() if by_name[name] == rank}
        assert found["gradients"] == pytest.approx(own), rank
        wanted = {n: [by_name[n] * 1000.0 + i + 100] for i, n in enumerate(SHAPES)}
        assert found["values"] == wanted, rank
    sizes = {name: parameter.nbytes for name, parameter in named.items()}
    for server in servers:
        own_bytes = sum(sizes[name] for name in SHAPES if by_name[name] == server)
        flags = sum(named[name].itemsize for name in SHAPES if by_name[name] == server)
        others = sum(worker != server for worker in workers)
        assert (
            ranks[server]["moved"] == ranks[server]["formula"] == others * (own_bytes + flags) + 2 * own_bytes
        )
