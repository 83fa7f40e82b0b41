"""How gradients and losses of micro-batches are added; order.py has the summation by chunks."""

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
    """The default order: each rank adds its micro-batches, and an all-reduce adds the ranks.

    Attributes:
        by_chunks: whether sums have the same bits however chunks are distributed among ranks.
        num_chunks: number of chunks per step, over all ranks.
        limit: bound of the numbers in a gradient, beyond which it becomes NaN.
        sums: the sums of the gradients of this rank's chunks; None if autograd adds gradients.
    """

    by_chunks = False
    num_chunks = 1
    limit = math.inf
    sums: ChunkSums | None = None

    def sum_of(self, numbers: Sequence[Tensor]) -> Tensor:
        """Return the sum of `numbers`, which have one shape, in a form that can be added."""
        return torch.stack(list(numbers)).double().sum(0) if len(numbers) > 1 else numbers[0]

    def numbers(self, sums: Tensor) -> Tensor:
        """Convert sums of `sum_of` to numbers."""
        return sums

    def over_ranks(self, sums: Tensor) -> Tensor:
        """Add sums of `sum_of` over all ranks, and convert them to numbers (a collective)."""
        return self.numbers(sum_over_ranks(sums.contiguous()))

    def mean_over(self, num_replicas: int) -> int:
        """Return the number by which sums of losses and gradients over ranks are divided afterwards."""
        return num_replicas

    def attach(self, model: nn.Module, shards: Sequence[ShardSums] = (), reduces: bool = False) -> None:
        """Called once, after the parameters and buffers of the model are on their device and sharded.

        Args:
            model: the unwrapped model.
            shards: the sums of FSDP's units, if gradients are reduced by chunks.
            reduces: whether the strategy adds the last chunk of a step and the chunks of other ranks (DDP).
        """

    def follow_trainable(self, model: nn.Module) -> None:
        """Sum the gradients of the parameters that now require gradients, from the next step on."""

    def check(self, optimizer: Optimizer, sharded: bool) -> None:
        """Check that the optimizer gives the same bits on shards; called once, before the first step.

        Args:
            sharded: whether ranks update shards of the parameters.

        Raises:
            UserError: the optimizer may update a shard differently from the same rows of the whole tensor.
        """

    def begin_step(self) -> None:
        """Called at the start of a step."""

    def chunk(self, last: bool) -> AbstractContextManager:
        """Return the context for one forward and backward pass of a step."""
        return nullcontext()

    def finish(self) -> None:
        """Complete the gradients, after the last backward pass of a step (a collective)."""

    def norm(self, trainable: TrainableParameters) -> Tensor:
        """Return the norm of all gradients, a scalar (a collective if parameters are sharded)."""
        return trainable.gradient_norm()


DEFAULT_ORDER = SumOrder()
