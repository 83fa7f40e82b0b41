"""As many ranks as a large host holds, on one host: an algorithm ends, and each rank has the sum.

The unread data between two ranks must not grow with their number: a socket has limited room.
"""

import resource
import time
from pathlib import Path

import pytest
import torch

from tests.comm.threads import run_threads
from trainer.comm.algorithms.all_reduce import build
from trainer.comm.transport.executor import CpuExecutor
from trainer.comm.transport.gloo import GlooLinks

RANKS = 32
SIZES = [1, 7, 1000, 40_001, 1, 1]  # elements; with segments of 8 KiB, 20 of them in the fourth


def summed(links: GlooLinks, algorithm: str) -> tuple[bool, int]:
    """Whether all sums were right, though a rank was late twice; and the files that all ranks had open."""
    hosts, are_right = [0] * RANKS, []
    executor = CpuExecutor(links, build(algorithm, links.rank, hosts), hosts, None, 8192)
    files = len(list(Path("/proc/self/fd").iterdir()))
    for number, numel in enumerate(SIZES):
        if links.rank == 2 and number in (3, 4):
            time.sleep(0.1)
        bucket = torch.full((numel,), float(links.rank + number))
        executor.run(bucket)
        are_right.append(bool(bucket.eq(sum(range(RANKS)) + RANKS * number).all()))
    executor.close()
    return all(are_right), files


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["master_worker", "halving_doubling", "ring"])
def test_32_ranks_have_the_sum(algorithm: str) -> None:
    """With the most messages at one rank, with the largest, and with the most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # those of all ranks are here
    try:
        found = run_threads(summed, RANKS, algorithm)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(is_right for is_right, _ in found)
    assert max(files for _, files in found) < RANKS * 128, "a login shell allows a process 1024"
