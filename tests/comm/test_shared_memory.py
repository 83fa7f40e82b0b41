"""Ranks of a host that share memory: one that does not come is named."""

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from trainer.comm.algorithms.all_reduce import ring
from trainer.comm.shared_memory import SharedMemory


def _meet(absent: int) -> str:
    """What the other of two ranks says if rank `absent` does not connect."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        if rank == absent:
            patch.setattr(SharedMemory, "_connected", lambda *_: ({}, {}))
        try:
            SharedMemory(dist.group.WORLD, ring(rank, [0, 0]), [0, 0], 1 << 16, 1, timeout_s=0.3)
        except dist.DistNetworkError as error:
            said = str(error)
        else:
            said = ""
    dist.barrier()
    return said


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_connect_is_named(absent: int) -> None:
    said = run_ranks(_meet, 2, absent)
    words = "did not answer within 0.3 s" if absent == 0 else "is gone: Connection re"  # refused, or reset
    assert said[1 - absent].startswith(f"rank {absent} {words}")
