"""An all-reduce between 32 ranks, as many as on a large host, ends with the right sum on each rank.

The unread data between two ranks must not grow with the number of ranks, because a socket has limited room.
"""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.comm.test_executor import executor_of
from tests.ranks import run_ranks

RANKS = 32
SIZES = [1, 7, 1000, 40_001, 1, 1]  # elements; with segments of 8 KiB, 20 of them in the fourth


def summed(algorithms: list[str]) -> tuple[bool, int]:
    """Return whether all sums were right although a rank was late twice, and the most files it had open."""
    hosts, are_right, files = [0] * RANKS, True, 0
    rank = dist.get_rank()
    for algorithm in algorithms:
        executor = executor_of(algorithm, hosts, None, 1 / 128)
        files = max(files, len(list(Path("/proc/self/fd").iterdir())))
        for number, numel in enumerate(SIZES):
            if rank == 2 and number in (3, 4):
                time.sleep(0.3)
            bucket = torch.full((numel,), float(rank + number))
            executor.run(bucket)
            are_right &= bool(bucket.eq(sum(range(RANKS)) + RANKS * number).all())
        executor.close()
    return are_right, files


@pytest.mark.slow
def test_32_ranks_get_the_right_sum() -> None:
    """Use the algorithms with the most messages at one rank, and with the largest messages."""
    found = run_ranks(summed, RANKS, ["master_worker", "halving_doubling"])
    assert all(is_right for is_right, _ in found)
    assert max(files for _, files in found) < 512, "a login shell allows a process 1024"
