"""In which order numbers of micro-batches are added: as they come, or by leaves for equal bits anywhere."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RMSprop

from trainer.comm.leaf_sums import LeafSums, limit
from trainer.comm.shard_sums import ShardSums
from trainer.distributed.collectives import sum_over_ranks
from trainer.errors import UserError
from trainer.exact.buffers import LeafBuffers
from trainer.exact.carried import Carried
from trainer.exact.environment import NUM_THREADS
from trainer.exact.norm import exact_norm
from trainer.gradient_norm import gradient_norm
from trainer.optim.combined import parts_of
from trainer.optim.whole_matrices import WholeMatrices

_ELEMENTWISE = (AdamW, Adam, SGD, RMSprop, NAdam)  # compared bit by bit, in shards cut anywhere


class SumOrder:
    """As they come: each rank adds its micro-batches, and an all-reduce the ranks.

    Attributes:
        by_leaves: whether sums have the same bits however leaves are shared among ranks.
        num_rows: of a table of numbers to be added over all ranks (`in_order`); `row` says to which to add.
        limit: of the numbers in a gradient, beyond which it becomes NaN.
        sums: what adds the gradients of leaves before they are reduced; None: autograd does.
    """

    by_leaves = False
    num_rows = 1
    limit = math.inf
    sums: LeafSums | None = None

    def row(self, micro_batch: int) -> int:
        """The row of this rank's micro-batch of this number in a step, or of its batch in an evaluation."""
        return 0

    def held_out_part(self, batch: int, num_shares: int, share: int) -> int:
        """The number within an evaluation, over all ranks, of a rank's `batch`: its random numbers follow."""
        return batch * num_shares + share

    def in_rows(self, losses: Sequence[Tensor]) -> Tensor:
        """The losses of this rank's micro-batches of a step, added: a scalar, or (num_rows,)."""
        return reduce(torch.add, losses)

    def mean_over(self, num_replicas: int) -> int:
        """The number by which the sum over ranks, of losses and gradients, is divided afterwards."""
        return num_replicas

    def total(self, label_counts: Sequence[float], device: torch.device) -> Tensor:
        """The sum of the counted labels of all micro-batches of a step, a scalar in fp64 (a collective)."""
        return sum_over_ranks(torch.full((), math.fsum(label_counts), dtype=torch.float64, device=device))

    def attach(self, model: nn.Module, shards: Sequence[ShardSums] = (), reduces: bool = False) -> None:
        """Called once, with the unwrapped model, when its parameters and buffers are where they stay.

        Args:
            shards: what adds the units of FSDP, if a collective does.
            reduces: whether the strategy itself adds the last leaf of a step and those of other ranks (DDP).
        """

    def check(self, optimizer: Optimizer, sharded: bool) -> None:
        """Called once, before the first step; `sharded`: whether ranks update parts of the parameters.

        Raises:
            UserError: its update has other bits on a part of a tensor than on the whole.
        """

    def begin_step(self) -> None:
        """Called when a step begins."""

    def leaf(self, last: bool) -> AbstractContextManager:
        """The context of one forward and backward pass of a step."""
        return nullcontext()

    def finish(self) -> None:
        """Called after the last backward pass of a step (a collective): the gradients are complete."""

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The norm of all gradients, a scalar (a collective over the ranks of sharded gradients, if any)."""
        return gradient_norm(parameters)


class ByLeaves(SumOrder):
    """By leaves: `num_leaves` fixed parts of each global batch, of which this rank computes `own`.

    Args:
        where: this rank, for messages.
    """

    by_leaves = True

    def __init__(self, num_leaves: int, num_replicas: int, own: range, where: str) -> None:
        self.num_rows, self._own, self._where = num_leaves, own, where
        self._most, self.limit = -(-num_leaves // num_replicas), limit(num_leaves)
        self._shards: Sequence[ShardSums] = ()
        self._reduces = False
        self._buffers: LeafBuffers | None = None
        self._carried: Carried | None = None

    def row(self, micro_batch: int) -> int:
        return self._own[min(micro_batch % self._most, len(self._own) - 1)]

    def held_out_part(self, batch: int, num_shares: int, share: int) -> int:
        return batch // self._most * self.num_rows + self.row(batch)

    def in_rows(self, losses: Sequence[Tensor]) -> Tensor:
        table = losses[0].new_zeros(self.num_rows)
        table[self._own.start : self._own.stop] = torch.stack(list(losses))
        return table

    def mean_over(self, num_replicas: int) -> int:
        return 1

    def total(self, label_counts: Sequence[float], device: torch.device) -> Tensor:
        table = torch.zeros(self.num_rows, dtype=torch.float64, device=device)
        table[self._own.start : self._own.stop] = torch.tensor(label_counts, dtype=torch.float64)
        return in_order(table)

    def attach(self, model: nn.Module, shards: Sequence[ShardSums] = (), reduces: bool = False) -> None:
        self._buffers, self._carried = LeafBuffers(model, self.num_rows, self._own.start), Carried(model)
        self._shards, self._reduces = shards, reduces
        if not shards:
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            self.sums = LeafSums(trained, self.num_rows)

    def check(self, optimizer: Optimizer, sharded: bool) -> None:
        on_cpu = any(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])
        if on_cpu and any(group.get("fused") for group in optimizer.param_groups):
            raise UserError(
                "train.exact: optim.fused=true rounds differently in the middle and at the end of a tensor "
                "on a CPU; set optim.fused=null"
            )
        for kind in map(type, parts_of(optimizer)):
            if sharded and kind not in (*_ELEMENTWISE, WholeMatrices):
                names = ", ".join(known.__name__ for known in _ELEMENTWISE)
                raise UserError(
                    f"train.exact: {kind.__name__} is not known to update each number by itself, but "
                    f"strategy=fsdp updates parts of tensors; use {names}, Muon, or strategy=ddp"
                )

    def begin_step(self) -> None:
        if (threads := torch.get_num_threads()) != NUM_THREADS:
            raise UserError(
                f"train.exact: {self._where} computes with {threads} threads, though the run set "
                f"{NUM_THREADS}: other bits would follow; remove torch.set_num_threads from your code"
            )
        assert self._carried is not None
        self._carried.begin_step()
        for part in (self.sums, *self._shards):
            if part is not None:
                part.reset()

    @contextmanager
    def leaf(self, last: bool) -> Iterator[None]:
        assert self._buffers is not None
        self._buffers.begin_leaf()
        yield
        self._buffers.end_leaf()
        if self.sums is not None and not (last and self._reduces):
            self.sums.add_leaf()

    def finish(self) -> None:
        assert self._buffers is not None and self._carried is not None
        self._carried.finish_step()
        if self.sums is not None and not self._reduces:
            self.sums.write_gradients()
        self._buffers.finish()

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        return exact_norm(parameters)


AS_THEY_COME = SumOrder()


def in_order(table: Tensor) -> Tensor:
    """The sum of the rows of all ranks' tables (a collective); in each row, all but one rank have zeros."""
    return reduce(torch.add, sum_over_ranks(table.contiguous()).unbind())
