"""The ranks that share a model: groups of their own, the hosts they are on, and what people call them."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.comm.transport.blame import CommError, PeerError

WIRE_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What chunks travel as; fp32 means uncompressed, in the dtype of what is sent."""


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
    """A group of the ranks of `like`, in their order in the world; nobody else is asked."""
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
    """The ranks of `group`, which schedules count from 0 and people as the world does; a collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
        self._names = [""] * len(self.ranks)
        dist.all_gather_object(self._names, socket.gethostname(), group=group)

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Raise a CommError for a PeerError: that `what` has stopped, and at whom."""
        try:
            yield
        except PeerError as error:
            message = f"{what} stopped at {self._place(self.rank)}: {self._place(error.peer)} {error.reason}"
            raise CommError(message, self.ranks[error.peer]) from error

    def in_world(self, waited_s: dict[int, float]) -> dict[int, float]:
        """What was waited for each member, by its rank in the world."""
        return {self.ranks[member]: seconds for member, seconds in waited_s.items()}

    def _place(self, member: int) -> str:
        return f"rank {self.ranks[member]} on host {self._names[member]}"
