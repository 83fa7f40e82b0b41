"""The ranks that share a model: their groups, their hosts, and their names in messages."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.comm.transport.blame import CommError, PeerError

WIRE_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes of chunks as sent; fp32 means uncompressed, in the dtype of the data."""


def hosts_of_members(group: dist.ProcessGroup, hosts: Sequence[int]) -> Sequence[int]:
    """The host index of every rank of `group`, given those of all ranks or of the group's."""
    ranks = sorted(dist.get_process_group_ranks(group))
    if len(hosts) == dist.get_world_size():
        return [hosts[rank] for rank in ranks]
    if len(hosts) != len(ranks):
        raise ValueError(
            f"hosts has {len(hosts)} entries; the model's group has {len(ranks)} ranks, "
            f"the world {dist.get_world_size()}"
        )
    return hosts


def new_group(like: dist.ProcessGroup, backend: str, timeout_s: float) -> dist.ProcessGroup:
    """Create a group of the ranks of `like`, in global order; other ranks take no part."""
    ranks = sorted(dist.get_process_group_ranks(like))
    group = dist.new_group(
        ranks,
        timedelta(seconds=timeout_s),
        backend,
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    assert isinstance(group, dist.ProcessGroup), "this process is outside the group of its model"
    return group


class Members:
    """The ranks of `group`: schedules count from 0, messages use global ranks (a collective)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
        self._names = [""] * len(self.ranks)
        dist.all_gather_object(self._names, socket.gethostname(), group=group)

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Turn a PeerError into a CommError that says that `what` stopped, and at which rank."""
        try:
            yield
        except PeerError as error:
            message = (
                f"{what} stopped at {self._describe(self.rank)}: {self._describe(error.peer)} {error.reason}"
            )
            raise CommError(message, self.ranks[error.peer]) from error

    def _describe(self, member: int) -> str:
        return f"rank {self.ranks[member]} on host {self._names[member]}"
