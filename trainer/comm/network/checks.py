"""Every operation of torch.distributed that training needs, run once on values whose result is known."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

_LENGTH = 1031  # elements: more than one packet, and no multiple of anything


@dataclass(frozen=True)
class Member:
    """One rank of the default process group, and where its tensors live."""

    rank: int
    world_size: int
    device: torch.device

    def data(self, rank: int) -> Tensor:
        """What `rank` contributes, (1031,) float64: sums stay exact at any world size.

        Signs alternate, so that the maximum comes from the last rank in one element, from rank 0 in the next.
        """
        index = torch.arange(1, _LENGTH + 1, dtype=torch.float64, device=self.device)
        return (rank + 1) * torch.where(index % 2 == 0, index, -index)

    def all_data(self) -> Tensor:
        """(world_size, 1031)."""
        return torch.stack([self.data(rank) for rank in range(self.world_size)])

    def blank(self, *shape: int) -> Tensor:
        return torch.full(shape or (_LENGTH,), torch.nan, dtype=torch.float64, device=self.device)

    @property
    def left(self) -> int:
        return (self.rank - 1) % self.world_size

    @property
    def right(self) -> int:
        return (self.rank + 1) % self.world_size

    @property
    def root(self) -> int:
        return self.world_size - 1


Pairs = Iterator[tuple[Tensor, Tensor]]
"""What this rank got, and what it should have got."""


def _send_recv(me: Member) -> Pairs:
    got = me.blank()
    if me.rank % 2 == 0:  # two blocking sends towards each other would wait for ever
        dist.send(me.data(me.rank), me.right)
        dist.recv(got, me.left)
    else:
        dist.recv(got, me.left)
        dist.send(me.data(me.rank), me.right)
    yield got, me.data(me.left)


def _isend_irecv(me: Member) -> Pairs:
    # Both ways round at once. With two ranks, left and right are one peer, and order tells what is what.
    from_left, from_right = me.blank(), me.blank()
    transfers = [
        dist.P2POp(dist.isend, me.data(me.rank), me.right),
        dist.P2POp(dist.isend, me.data(me.rank) + 0.5, me.left),
        dist.P2POp(dist.irecv, from_left, me.left),
        dist.P2POp(dist.irecv, from_right, me.right),
    ]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    yield from_left, me.data(me.left)
    yield from_right, me.data(me.right) + 0.5


def _broadcast(me: Member) -> Pairs:
    got = me.data(me.rank)
    dist.broadcast(got, me.root)
    yield got, me.data(me.root)


def _reduce(me: Member) -> Pairs:
    for op, wanted in ((dist.ReduceOp.SUM, me.all_data().sum(0)), (dist.ReduceOp.MAX, me.all_data().amax(0))):
        got = me.data(me.rank)
        dist.reduce(got, me.root, op)
        if me.rank == me.root:
            yield got, wanted


def _scatter(me: Member) -> Pairs:
    got = me.blank()
    dist.scatter(got, list(me.all_data()) if me.rank == me.root else None, me.root)
    yield got, me.data(me.rank)


def _scatter_by_split(me: Member) -> Pairs:
    """What serves where a backend has no scatter: all get everything and keep their part."""
    everything = me.all_data() if me.rank == me.root else me.blank(me.world_size, _LENGTH)
    dist.broadcast(everything, me.root)
    yield everything[me.rank], me.data(me.rank)


def _gather(me: Member) -> Pairs:
    got = [me.blank() for _ in range(me.world_size)] if me.rank == me.root else None
    dist.gather(me.data(me.rank), got, me.root)
    if got is not None:
        yield torch.stack(got), me.all_data()


def _all_reduce(me: Member) -> Pairs:
    for op, wanted in ((dist.ReduceOp.SUM, me.all_data().sum(0)), (dist.ReduceOp.MAX, me.all_data().amax(0))):
        got = me.data(me.rank)
        dist.all_reduce(got, op)
        yield got, wanted


def _all_gather(me: Member) -> Pairs:
    got = me.blank(me.world_size * _LENGTH)
    dist.all_gather_into_tensor(got, me.data(me.rank))
    yield got, me.all_data().flatten()


def _reduce_scatter(me: Member) -> Pairs:
    got = me.blank()
    # Part p of rank r is data(r) + p, so that a part that lands on the wrong rank shows.
    parts = torch.cat([me.data(me.rank) + part for part in range(me.world_size)])
    dist.reduce_scatter_tensor(got, parts)
    yield got, me.all_data().sum(0) + me.rank * me.world_size


def _barrier(me: Member) -> Pairs:
    dist.barrier()
    yield from ()


def _sub_groups(me: Member) -> Pairs:
    """Even and odd ranks apart, both at once."""
    for parity in (0, 1):
        ranks = list(range(parity, me.world_size, 2))
        if not ranks:
            continue
        group = dist.new_group(ranks)
        if me.rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            got = me.data(me.rank)
            dist.all_reduce(got, group=group)
            dist.destroy_process_group(group)
            yield got, me.all_data()[ranks].sum(0)


def _pair_by_broadcast(me: Member) -> Pairs:
    """What serves where a backend has no send and recv: a group of two in which the sender broadcasts."""
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


CHECKS: dict[str, Callable[[Member], Pairs]] = {
    "barrier": _barrier,
    "send, recv": _send_recv,
    "isend, irecv": _isend_irecv,
    "broadcast": _broadcast,
    "reduce (sum, max)": _reduce,
    "scatter": _scatter,
    "scatter by split": _scatter_by_split,
    "gather": _gather,
    "all_reduce (sum, max)": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "sub-groups": _sub_groups,
    "pair by broadcast": _pair_by_broadcast,
}
NEED_TWO = {"send, recv", "isend, irecv", "pair by broadcast"}


def wrong(pairs: Pairs) -> str | None:
    """The first difference between what was got and what was wanted, in words; None if there is none."""
    # All of them first: to stop half-way through a check would leave the peers waiting.
    for got, wanted in list(pairs):
        differs = (got != wanted).flatten().cpu()  # waits for a GPU
        if differs.any():
            index = int(differs.nonzero()[0])
            found, known = got.flatten()[index].item(), wanted.flatten()[index].item()
            return f"element {index} is {found:g} where {known:g} is right"
    return None
