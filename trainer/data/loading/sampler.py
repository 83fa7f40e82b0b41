"""Which samples each rank reads, and in which order.

Training: an epoch e is an order (trainer.data.order) drawn from (seed, e) alone, and a batch is its next B
samples, so a run on 1, 2 or 8 ranks, resumed or not, sees the same batches. A run resumed with another B
continues with the very next sample. A remainder of less than B samples at the end of an epoch is not trained
on.
A stream keeps its own order; the slices are cut from it in the same way.
Evaluation: every sample exactly once, with the same number of batches on each rank.
"""

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from trainer.data.loading.batch import BatchSplit
from trainer.data.loading.reader import Request, seed_generators
from trainer.data.order import Order, shuffled
from trainer.errors import UserError
from trainer.tensors.generators import generators_kept


class Requests(Sampler[Request]):
    """Asks for the micro-batches of a replica, from ``first_sample`` of ``epoch`` on, without end."""

    def __init__(self, batch: BatchSplit, replica: int) -> None:
        self.batch, self.replica = batch, replica
        self.epoch = self.first_sample = self._reading = 0

    def __iter__(self) -> Iterator[Request]:
        self._reading += 1
        epoch, reading = self.epoch, self._reading
        for first, numbers in self._micro_batches():
            yield Request(epoch, first, numbers, reading)

    def _micro_batches(self) -> Iterator[tuple[int, range]]:
        return self.batch.micro_batches(self.first_sample, self.replica)


class IndexRequests(Requests):
    """Asks for whole steps, by the indices of an epoch's order.

    Raises:
        UserError: the dataset is smaller than one global batch.
    """

    def __init__(
        self, dataset: Any, batch: BatchSplit, replica: int, seed: int, order: Order = shuffled
    ) -> None:
        super().__init__(batch, replica)
        if len(dataset) < batch.global_batch_size:
            raise UserError(
                f"the training data holds {len(dataset)} samples, fewer than one global batch of "
                f"{batch.global_batch_size} ({batch.num_replicas} replicas x {batch.local_size}); "
                + ("lower train.global_batch_size or use fewer ranks" if len(dataset) else "look at its path")
            )
        self.seed, self.num_samples = seed, len(dataset)
        self._dataset, self._order = dataset, order

    def __len__(self) -> int:
        """Micro-batches of the next iteration."""
        steps = (self.num_samples - self.first_sample) // self.batch.global_batch_size
        return steps * self.batch.accumulation

    @property
    def _is_permutation(self) -> bool:
        """Whether the order is torch's own permutation: valid, and drawn from the given generator alone."""
        return self._order is shuffled and not hasattr(self._dataset, "epoch_order")

    def order_of(self, epoch: int) -> Tensor:
        """The indices of an epoch. UserError: they are not an int64 tensor with one for each sample."""
        # A tensor, not a list: data=tokens has a billion numbers.
        generator = torch.Generator().manual_seed(self.seed + epoch)
        if self._is_permutation:
            return self._order(self._dataset, generator)
        with generators_kept(
            of_accelerators=False
        ):  # from which an order may draw as well: on every rank the same numbers
            seed_generators(self.seed, epoch, self.num_samples)
            order = self._order(self._dataset, generator)
        if order.shape != (self.num_samples,) or order.dtype != torch.int64:
            raise UserError(
                f"the order of an epoch is {order.dtype} {tuple(order.shape)}, but must be a tensor of "
                f"{self.num_samples} indices, torch.int64"
            )
        return order

    def order_hash(self) -> str | None:
        """A hash of the first epoch's order, which must be equal on all ranks; None for torch's permutation.

        Raises:
            UserError: the order has an index of no sample, or is another one in a second call.
        """
        if self._is_permutation:
            return None
        order = self.order_of(0)
        least, largest, last = int(order.min()), int(order.max()), self.num_samples - 1
        if least < 0 or (largest > last and not hasattr(self._dataset, "epoch_order")):
            raise UserError(
                f"the order of an epoch has indices from {least} to {largest}, but samples have 0 to {last}"
            )
        if not order.equal(self.order_of(0)):
            raise UserError(
                "the order of an epoch is another one in a second call, so a resumed run would read other "
                "samples: let it follow from the dataset and the generator alone"
            )
        return hashlib.blake2b(order.numpy().data, digest_size=8).hexdigest()

    def __iter__(self) -> Iterator[Request]:
        order, requests = self.order_of(self.epoch), super().__iter__()
        for request in itertools.islice(requests, len(self)):
            own = request.numbers
            yield Request(request.epoch, request.first, order[own.start : own.stop : own.step].tolist())


class EvalRequests(Requests):
    """Asks for this replica's part of the held-out samples, without end.

    Each replica asks as often for each first number, so that a model whose forward pass is collective (FSDP)
    stays in step; no sample is padded or repeated.
    """

    def _micro_batches(self) -> Iterator[tuple[int, range]]:
        return self.batch.held_out(self.replica)
