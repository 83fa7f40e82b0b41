"""If a rank of a host does not connect to the shared memory of its peers, the error names it."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from trainer.comm.algorithms.all_reduce import ring
from trainer.comm.shared_memory import SharedMemory, rows_of_host


def _connect(absent: int) -> str:
    """Return the error message of the other rank if rank `absent` does not connect."""
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
    said = run_ranks(_connect, 2, absent)
    # The connection is refused or reset, or the pipe is broken.
    expected = f"lost the connection to rank {absent}" if absent else "rank 0 did not answer within 0.3 s"
    assert said[1 - absent].startswith(expected)


def rows_of_all() -> None:
    here: Any = SimpleNamespace(world_size=4, device=torch.device("cpu"), num_hosts=1)
    rank, rows = dist.get_rank(), rows_of_host(here, timeout_s=0.1)
    assert rows is not None
    time.sleep(0.3 * (rank == 3))  # a slow rank, which only the watch can distinguish from one that hangs
    for number, dtype in enumerate(
        (torch.float64, torch.int64, torch.float64)
    ):  # lengths and dtypes may change
        own = torch.arange(5 + number, dtype=dtype) + 10 * rank
        rows.send(own)
        own += 1  # must not change what was sent
        expected = torch.arange(5 + number, dtype=dtype) + 10 * torch.arange(4).to(dtype).unsqueeze(1)
        assert rows.receive().equal(expected)
    if rank == 2:
        rows.close()
    dist.barrier()
    if rank != 2:
        with pytest.raises(dist.DistNetworkError, match="lost the connection to rank 2"):
            rows.send(torch.ones(5))
    dist.barrier()


def test_host_rows_are_equal_on_all_ranks_or_name_the_missing_rank() -> None:
    run_ranks(rows_of_all, 4)
