"""The default order of summation over micro-batches and ranks; order.py implements summation by chunks."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.accelerator import double
from trainer.distributed.collectives import sum_over_ranks
from trainer.exact.chunk_sums import ChunkSums
from trainer.exact.shard_sums import ShardSums
from trainer.exact.sum_checks import NO_CHECKS, SumChecks
from trainer.model.trainable_parameters import TrainableParameters


class SumOrder:
    """The default order: each rank sums over its micro-batches, and an all-reduce sums over ranks."""

    by_chunks = False  # whether the bits of sums depend only on the chunks
    num_chunks = 1  # per step, over all ranks
    limit = math.inf  # gradients with larger numbers become NaN
    sums: ChunkSums | None = None  # the sums of this rank's gradients; None if autograd adds them
    checks: SumChecks = NO_CHECKS  # observe the numbers that are added, sent and received

    def sum_of(self, numbers: Sequence[Tensor]) -> Tensor:
        """Return the sum of `numbers`, which have equal shapes, in a form in which such sums can be added."""
        return double(torch.stack(list(numbers))).sum(0) if len(numbers) > 1 else double(numbers[0])

    def numbers(self, sums: Tensor) -> Tensor:
        """Convert sums of `sum_of` to numbers."""
        return sums

    def over_ranks(self, sums: Tensor) -> Tensor:
        """Add sums of `sum_of` over all ranks, and convert them to numbers (a collective)."""
        return self.numbers(sum_over_ranks(sums.contiguous()))

    def mean_over(self, num_replicas: int) -> int:
        """Return the number by which to divide sums of losses and gradients over ranks."""
        return num_replicas

    def attach(self, model: nn.Module, shards: Sequence[ShardSums] = (), reduces: bool = False) -> None:
        """Prepare the sums, after the parameters and buffers are on their device and sharded.

        Args:
            model: the unwrapped model.
            shards: the sums of FSDP's units, if gradients are reduced by chunks.
            reduces: whether the strategy adds the last chunk of a step and the chunks of other ranks (DDP).
        """

    def follow_trainable(self, model: nn.Module) -> None:
        """Sum the gradients of the parameters that now require gradients, from the next step on."""

    def check(self, optimizer: Optimizer, sharded: bool) -> None:
        """Raise UserError if the optimizer may update a shard differently than rows of a whole tensor."""

    def begin_step(self) -> None:
        """Clear the sums at the start of a step."""

    def discard(self) -> None:
        """Discard the chunks of the step so far, and restore the buffers that they changed."""

    def chunk(self, last: bool) -> AbstractContextManager:
        """Return the context for one forward and backward pass of a step."""
        return nullcontext()

    def finish(self) -> None:
        """Complete the gradients, after the last backward pass of a step (a collective)."""

    def norm(self, trainable: TrainableParameters) -> Tensor:
        """Return the norm of all gradients, as a scalar tensor; a collective if parameters are sharded."""
        return trainable.gradient_norm()


DEFAULT_ORDER = SumOrder()
