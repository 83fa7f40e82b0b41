"""As many ranks as a large host holds, on one host: every algorithm ends, and trains as native does.

What is unread between two ranks must not grow with their number: a socket has so much room and no more.
"""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.comm.test_hook import network
from tests.ranks import run_ranks
from trainer.comm.execution.executor import CpuExecutor
from trainer.comm.hook import attach
from trainer.comm.schedules.algorithms import ALGORITHMS, build

SIZES = [1, 7, 1000, 40_001, 1, 1]  # elements; with segments of 4 KiB, 40 of them in the fourth


def losses(algorithm: str, num_steps: int) -> list[float]:
    """The mean loss over all ranks at each step; many small buckets, and a rank that is late once."""
    model = DistributedDataParallel(network(), bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    hook = attach(model, algorithm, hosts=[0] * dist.get_world_size(), timeout_s=60.0, segment_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(num_steps):
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))
        loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
        optimizer.zero_grad()
        if (step, dist.get_rank()) == (1, 2):
            time.sleep(0.5)
        with hook.plain_errors():
            loss.backward()
        optimizer.step()
        found.append(loss.detach())
    mean = torch.stack(found)
    dist.all_reduce(mean)
    hook.close()
    return (mean / dist.get_world_size()).tolist()


def train_and_sum(num_steps: int) -> dict[str, Any]:
    rank, hosts = dist.get_rank(), [0] * dist.get_world_size()
    found: dict[str, Any] = {"native": losses("native", num_steps)}
    group = dist.new_group(backend="gloo")
    for algorithm in ALGORITHMS:
        found[algorithm] = losses(algorithm, num_steps)
        executor = CpuExecutor(group, build(algorithm, rank, hosts), hosts, None, 4096, timeout_s=60.0)
        for numel in SIZES:
            bucket = torch.full((numel,), float(rank))
            executor.run(bucket)
            assert bucket.eq(sum(range(len(hosts)))).all(), f"{algorithm}, {numel} elements"
        executor.close()
    found["files"] = len(list(Path("/proc/self/fd").iterdir()))
    return found


@pytest.mark.slow
def test_every_algorithm_trains_as_native_does_on_32_ranks() -> None:
    for found in run_ranks(train_and_sum, 32, 3):
        for algorithm in ALGORITHMS:
            assert found[algorithm] == pytest.approx(found["native"], abs=1e-5), algorithm
        assert found["native"][-1] != pytest.approx(found["native"][0], abs=1e-3), "it has not learned"
        assert found["files"] < 1024, "what a login shell allows"
