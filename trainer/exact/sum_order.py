"""How numbers of micro-batches are added: here as they come; order.py adds them by chunks."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.distributed.collectives import sum_over_ranks
from trainer.exact.chunk_sums import ChunkSums
from trainer.exact.shard_sums import ShardSums
from trainer.model.trainable_parameters import TrainableParameters


class SumOrder:
    """As they come: each rank adds its micro-batches, and an all-reduce the ranks.

    Attributes:
        by_chunks: whether sums have the same bits however chunks are shared among ranks.
        num_chunks: of a step, over all ranks.
        limit: of the numbers in a gradient, beyond which it becomes NaN.
        sums: what adds the gradients of chunks before they are reduced; None: autograd does.
    """

    by_chunks = False
    num_chunks = 1
    limit = math.inf
    sums: ChunkSums | None = None

    def sum_of(self, numbers: Sequence[Tensor]) -> Tensor:
        """The sum of `numbers`, of one shape, in a form to be added to others, and by `over_ranks`."""
        return torch.stack(list(numbers)).double().sum(0) if len(numbers) > 1 else numbers[0]

    def numbers(self, sums: Tensor) -> Tensor:
        """Sums of `sum_of` as numbers again."""
        return sums

    def over_ranks(self, sums: Tensor) -> Tensor:
        """The sum over all ranks of sums of `sum_of`, as numbers again (a collective)."""
        return self.numbers(sum_over_ranks(sums.contiguous()))

    def mean_over(self, num_replicas: int) -> int:
        """The number by which the sum over ranks, of losses and gradients, is divided afterwards."""
        return num_replicas

    def attach(self, model: nn.Module, shards: Sequence[ShardSums] = (), reduces: bool = False) -> None:
        """Called once, with the unwrapped model, when its parameters and buffers are where they stay.

        Args:
            shards: what adds the units of FSDP, if a collective does.
            reduces: whether the strategy itself adds the last chunk of a step and those of other ranks (DDP).
        """

    def follow_trainable(self, model: nn.Module) -> None:
        """Add up the gradients of the parameters that now require gradients, from the next step on."""

    def check(self, optimizer: Optimizer, sharded: bool) -> None:
        """Called once, before the first step; `sharded`: whether ranks update parts of the parameters.

        Raises:
            UserError: its update of a part of a tensor differs from that of the whole.
        """

    def begin_step(self) -> None:
        """Called when a step begins."""

    def chunk(self, last: bool) -> AbstractContextManager:
        """The context of one forward and backward pass of a step."""
        return nullcontext()

    def finish(self) -> None:
        """Called after the last backward pass of a step (a collective): the gradients are complete."""

    def norm(self, trainable: TrainableParameters) -> Tensor:
        """The norm of all gradients, a scalar (a collective over the ranks of sharded ones, if any)."""
        return trainable.gradient_norm()


AS_THEY_COME = SumOrder()
