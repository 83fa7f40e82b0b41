"""DDP trains the same with each algorithm as with gloo's own all-reduce, and a lost peer is named."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import RankFailure, run_ranks
from trainer.comm.algorithms.all_reduce import ALGORITHMS
from trainer.comm.ddp_hook import CommHook, attach


def network(batch_norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(64) if batch_norm else nn.Identity()
    return nn.Sequential(nn.Linear(20, 64), norm, nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def train(model: nn.Module, steps: int = 10, accumulate: int = 1) -> torch.Tensor:
    """Return the parameters after `steps` of SGD on data that differs between ranks and steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulate):
            model.require_backward_grad_sync = micro == accumulate - 1  # what no_sync() sets
            generator = torch.Generator().manual_seed(1000 * dist.get_rank() + 10 * step + micro)
            x = torch.randn(8, 20, generator=generator)
            loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
            (loss / accumulate).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def wrap(
    algorithm: str | None, hosts: list[int], module: nn.Module, **settings: Any
) -> tuple[nn.Module, CommHook | None]:
    # Many small buckets, which DDP rebuilds after the first step.
    model = DistributedDataParallel(module, bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    return model, attach(model, algorithm, hosts=hosts, timeout_s=30.0, **settings) if algorithm else None


def compare(hosts: list[int], batch_norm: bool, accumulate: int) -> dict[str, tuple[float, float, int]]:
    """Return, by algorithm, the largest difference to plain DDP, the distance trained, recorded passes."""

    start = torch.cat([parameter.detach().flatten() for parameter in network(batch_norm).parameters()])
    plain = train(wrap(None, hosts, network(batch_norm))[0], accumulate=accumulate)
    found = {}
    for algorithm in ("native", *ALGORITHMS):
        model, hook = wrap(algorithm, hosts, network(batch_norm))
        assert hook is not None
        mine = train(model, accumulate=accumulate)
        everyone = [torch.empty_like(mine) for _ in hosts]
        dist.all_gather(everyone, mine)
        assert all(torch.equal(mine, other) for other in everyone), f"{algorithm}: replicas differ"
        found[algorithm] = (
            float((mine - plain).abs().max()),
            float((plain - start).abs().max()),
            hook.timeline.num_passes,
        )
        assert hook.timeline.metrics()["usage/comm/total_ms"] > 0
        hook.close()
    return found


@pytest.mark.parametrize(
    ("hosts", "batch_norm", "accumulate"),
    [([0, 0], False, 1), pytest.param([0, 0, 1], True, 3, marks=pytest.mark.slow)],
)
def test_training_equals_native(hosts: list[int], batch_norm: bool, accumulate: int) -> None:
    for found in run_ranks(compare, len(hosts), hosts, batch_norm, accumulate):
        for algorithm, (difference, distance, num_passes) in found.items():
            assert difference < 2e-6 < 0.01 < distance, f"{algorithm}: {difference} off, {distance} trained"
            assert num_passes == 10, algorithm


def compare_compressed(hosts: list[int]) -> dict[str, tuple[float, float]]:
    start = torch.cat([parameter.detach().flatten() for parameter in network().parameters()])
    plain = train(wrap(None, hosts, network())[0])
    found = {}
    for algorithm, wire in (("ring", "bf16"), ("native", "fp16")):
        model, hook = wrap(algorithm, hosts, network(), wire_dtype=wire)
        mine = train(model)
        assert hook is not None
        hook.close()
        found[algorithm] = (float((mine - plain).norm()), float((plain - start).norm()))
    return found


@pytest.mark.slow
def test_compressed_training_is_close_to_native() -> None:
    for found in run_ranks(compare_compressed, 2, [0, 1]):
        for algorithm, (difference, distance) in found.items():
            assert 0 < difference < 0.01 * distance, f"{algorithm}: {difference} off, {distance} trained"


def lose_a_peer(hosts: list[int], lost: int, how: str, reported: Path) -> tuple[str, float]:
    """Return the error of a backward pass after rank `lost` has left, and the seconds until it was raised.

    A rank that hangs does so until the other ranks have reported.
    """
    model = DistributedDataParallel(network(), bucket_cap_mb=0.01)
    hook = attach(model, "ring", hosts=hosts, timeout_s=3.0 if how == "hangs" else 300.0)
    train(model, steps=3)
    if dist.get_rank() == lost:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        while len(list(reported.iterdir())) < len(hosts) - 1:
            time.sleep(0.05)
        return "slept", 0.0
    began = time.monotonic()
    try:
        with hook.original_errors():
            train(model, steps=1)
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    finally:
        (reported / str(dist.get_rank())).touch()
    return "no error", 0.0


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 1, 2]], ids=["shared memory", "gloo"])
def test_other_ranks_stop_waiting_for_a_hung_rank_after_the_timeout(hosts: list[int], tmp_path: Path) -> None:
    results = run_ranks(lose_a_peer, 3, hosts, 2, "hangs", tmp_path)
    for message, seconds in results[:2]:
        assert re.search(r"imed out|did not answer within 3 s|lost the connection|closed", message), message
        assert 2.9 < seconds < 30


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 1, 2]], ids=["shared memory", "gloo"])
def test_other_ranks_stop_waiting_for_a_dead_rank_at_once(hosts: list[int], tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(lose_a_peer, 3, hosts, 2, "dies", tmp_path)
    assert set(failure.value.reports) == {2}
    for message, seconds in failure.value.results.values():
        assert message != "no error" and seconds < 30, message
