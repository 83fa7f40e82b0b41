"""Every operation of torch.distributed that training may need, run on values with a known result."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.single_tensor import all_gather_single, reduce_scatter_single

_LENGTH = 1031  # elements: more than one packet; a prime number


@dataclass(frozen=True)
class GroupRank:
    """One rank of a group, counted within it, and the device of its tensors.

    `ranks` are the members' global ranks, in order; empty for the default group of all ranks.
    """

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    ranks: tuple[int, ...] = ()

    def data(self, rank: int) -> Tensor:
        """What `rank` contributes, (1031,) float64: sums stay exact at any world size.

        Signs alternate, so the maximum comes from the last rank in one element, from rank 0 in the next.
        """
        index = torch.arange(1, _LENGTH + 1, dtype=torch.float64, device=self.device)
        return (rank + 1) * torch.where(index % 2 == 0, index, -index)

    def factors(self, rank: int) -> Tensor:
        """Numbers whose products over ranks stay exact: 2 where (index + rank) is even, -1 elsewhere."""
        index = torch.arange(_LENGTH, device=self.device)
        return torch.where((index + rank) % 2 == 0, 2.0, -1.0).double()

    def all_data(self) -> Tensor:
        """(world_size, 1031)."""
        return torch.stack([self.data(rank) for rank in range(self.world_size)])

    def reductions(self) -> Iterator[tuple[dist.ReduceOp.RedOpType, Tensor, Tensor]]:
        """Yield each operation, what this rank contributes, and the expected result."""
        own, everyones = self.data(self.rank), self.all_data()
        yield dist.ReduceOp.SUM, own.clone(), everyones.sum(0)
        yield dist.ReduceOp.MAX, own.clone(), everyones.amax(0)
        yield dist.ReduceOp.MIN, own.clone(), everyones.amin(0)
        factors = torch.stack([self.factors(rank) for rank in range(self.world_size)])
        yield dist.ReduceOp.PRODUCT, self.factors(self.rank), factors.prod(0)

    def blank(self, *shape: int) -> Tensor:
        return torch.full(shape or (_LENGTH,), torch.nan, dtype=torch.float64, device=self.device)

    def in_world(self, rank: int) -> int:
        """The global rank of the group's `rank`, which torch expects for peers and roots."""
        rank %= self.world_size
        return self.ranks[rank] if self.ranks else rank

    @property
    def left(self) -> int:
        return self.in_world(self.rank - 1)

    @property
    def right(self) -> int:
        return self.in_world(self.rank + 1)

    @property
    def root(self) -> int:
        return self.in_world(self.world_size - 1)

    @property
    def is_root(self) -> bool:
        return self.rank == self.world_size - 1


Pairs = Iterator[tuple[Tensor, Tensor]]
"""What this rank received, and what it should have received."""


def _send_recv(me: GroupRank) -> Pairs:
    got = me.blank()
    if me.rank % 2 == 0:  # two ranks that both send first, blocking, would wait forever
        dist.send(me.data(me.rank), me.right, me.group)
        dist.recv(got, me.left, me.group)
    else:
        dist.recv(got, me.left, me.group)
        dist.send(me.data(me.rank), me.right, me.group)
    yield got, me.data((me.rank - 1) % me.world_size)


def _isend_irecv(me: GroupRank) -> Pairs:
    # Both directions at once. With two ranks, left and right are one peer, told apart by order.
    from_left, from_right = me.blank(), me.blank()
    transfers = [
        dist.P2POp(dist.isend, me.data(me.rank), me.right, me.group),
        dist.P2POp(dist.isend, me.data(me.rank) + 0.5, me.left, me.group),
        dist.P2POp(dist.irecv, from_left, me.left, me.group),
        dist.P2POp(dist.irecv, from_right, me.right, me.group),
    ]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    yield from_left, me.data((me.rank - 1) % me.world_size)
    yield from_right, me.data((me.rank + 1) % me.world_size) + 0.5


def _broadcast(me: GroupRank) -> Pairs:
    got = me.data(me.rank)
    dist.broadcast(got, me.root, me.group)
    yield got, me.data(me.world_size - 1)


def _reduce(me: GroupRank) -> Pairs:
    for op, got, wanted in me.reductions():
        dist.reduce(got, me.root, op, me.group)
        if me.is_root:
            yield got, wanted


def _scatter(me: GroupRank) -> Pairs:
    got = me.blank()
    dist.scatter(got, list(me.all_data()) if me.is_root else None, me.root, me.group)
    yield got, me.data(me.rank)


def _scatter_by_split(me: GroupRank) -> Pairs:
    """A substitute if a backend has no scatter: all receive everything and keep their part."""
    everything = me.all_data() if me.is_root else me.blank(me.world_size, _LENGTH)
    dist.broadcast(everything, me.root, me.group)
    yield everything[me.rank], me.data(me.rank)


def _gather(me: GroupRank) -> Pairs:
    got = [me.blank() for _ in range(me.world_size)] if me.is_root else None
    dist.gather(me.data(me.rank), got, me.root, me.group)
    if got is not None:
        yield torch.stack(got), me.all_data()


def _all_reduce(me: GroupRank) -> Pairs:
    for op, got, wanted in me.reductions():
        dist.all_reduce(got, op, me.group)
        yield got, wanted


def _all_gather(me: GroupRank) -> Pairs:
    got = me.blank(me.world_size * _LENGTH)
    all_gather_single(got, me.data(me.rank), me.group)
    yield got, me.all_data().flatten()


def _reduce_scatter(me: GroupRank) -> Pairs:
    got = me.blank()
    # Part p of rank r is data(r) + p, so a part on the wrong rank is detected.
    parts = torch.cat([me.data(me.rank) + part for part in range(me.world_size)])
    reduce_scatter_single(got, parts, me.group)
    yield got, me.all_data().sum(0) + me.rank * me.world_size


def _all_to_all(me: GroupRank) -> Pairs:
    got = me.blank(me.world_size, _LENGTH)
    parts = torch.stack([me.data(me.rank) + part for part in range(me.world_size)])
    dist.all_to_all_single(got, parts, group=me.group)
    yield got, me.all_data() + me.rank


def _barrier(me: GroupRank) -> Pairs:
    dist.barrier(me.group)
    yield from ()


def _pair_by_broadcast(me: GroupRank) -> Pairs:
    """A substitute if a backend has no send and recv: the sender broadcasts in a group of two."""
    pair = [0, me.root]
    group = dist.new_group(pair)
    if me.rank not in pair:
        return
    assert isinstance(group, dist.ProcessGroup)
    for sender in pair:
        got = me.data(me.rank)
        dist.broadcast(got, sender, group=group)
        yield got, me.data(sender)
    dist.destroy_process_group(group)


CHECKS: dict[str, Callable[[GroupRank], Pairs]] = {
    "barrier": _barrier,
    "send, recv": _send_recv,
    "isend, irecv": _isend_irecv,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "scatter": _scatter,
    "scatter by split": _scatter_by_split,
    "gather": _gather,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "pair by broadcast": _pair_by_broadcast,
}
"""Reductions are sum, max, min and product."""
NEED_TWO = {"send, recv", "isend, irecv", "pair by broadcast"}
OF_ALL = {"pair by broadcast"}  # creates groups, so all ranks take part


def wrong(pairs: Pairs) -> str | None:
    """Describe the first difference between received and expected values; None if they are equal."""
    # Compare all first: to stop half-way through a check would leave the peers waiting.
    for got, wanted in list(pairs):
        differs = (got != wanted).flatten().cpu()  # waits for a GPU
        if differs.any():
            index = int(differs.nonzero()[0])
            found, known = got.flatten()[index].item(), wanted.flatten()[index].item()
            return f"element {index} is {found:g}, but should be {known:g}"
    return None
