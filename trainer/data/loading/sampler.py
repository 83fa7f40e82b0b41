"""Samplers, which determine which samples each rank reads, and in which order.

The order of a training epoch (trainer.data.order) is determined by the seed and the epoch, and each global
batch consists of the next B samples. So a run on 1, 2 or 8 ranks, resumed or not, sees the same batches. A
run that is resumed with another B continues with the next sample. If fewer than B samples remain at the end
of an epoch, they are not used.

A stream keeps its own order, and is divided among ranks in the same way. An evaluation reads every sample
exactly once, with the same number of batches on each rank.
"""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from trainer.data.loading.batch import BatchSplit
from trainer.data.loading.reader import Request, seed_generators
from trainer.data.order import Order, shuffled
from trainer.errors import UserError
from trainer.tensors.generators import generators_kept


class Requests(Sampler[Request]):
    """Yields endless requests for the micro-batches of a replica, from `first_sample` of `epoch` on."""

    def __init__(self, batch: BatchSplit, replica: int, held_out: bool = False) -> None:
        self.batch, self.replica, self._held_out = batch, replica, held_out
        self.epoch = self.first_sample = self._reading = 0

    def __iter__(self) -> Iterator[Request]:
        self._reading += 1
        epoch, reading = self.epoch, self._reading
        for first, numbers in self.batch.micro_batches(self.first_sample, self.replica, self._held_out):
            yield Request(epoch, first, numbers, reading)


class IndexRequests(Requests):
    """Yields requests for complete steps, with the indices of an epoch in their order."""

    def __init__(
        self, dataset: Any, batch: BatchSplit, replica: int, seed: int, order: Order = shuffled
    ) -> None:
        super().__init__(batch, replica)
        if len(dataset) < batch.global_batch_size:
            raise UserError(
                f"the training data has {len(dataset)} samples, fewer than one global batch of "
                f"{batch.global_batch_size} ({batch.num_replicas} replicas x {batch.local_size}); "
                + ("lower train.global_batch_size or use fewer ranks" if len(dataset) else "check its path")
            )
        self.seed, self.num_samples = seed, len(dataset)
        self._dataset, self._order = dataset, order

    def __len__(self) -> int:
        """Return the number of micro-batches in the next iteration."""
        steps = (self.num_samples - self.first_sample) // self.batch.global_batch_size
        return steps * self.batch.accumulation

    @property
    def _is_permutation(self) -> bool:
        """Whether the order is torch.randperm, which needs no checks."""
        return self._order is shuffled and not hasattr(self._dataset, "epoch_order")

    def order_of(self, epoch: int) -> Tensor:
        """Return the indices of an epoch. Raises UserError if their number or an index is wrong."""
        # A tensor takes less memory than a list: data=tokens may have a billion indices.
        generator = torch.Generator().manual_seed(self.seed + epoch)
        if self._is_permutation:
            return self._order(self._dataset, generator)
        with generators_kept(of_accelerators=False):  # a custom order may use the global generators
            seed_generators(self.seed, epoch, self.num_samples)
            indices = self._order(self._dataset, generator)
        order = torch.as_tensor(indices)  # may be a list or an array
        if order.shape != (self.num_samples,) or order.dtype != torch.int64:
            raise UserError(
                f"the order of epoch {epoch} must be a torch.int64 tensor of {self.num_samples} indices, "
                f"but is {order.dtype} of shape {tuple(order.shape)}"
            )
        least, largest, last = int(order.min()), int(order.max()), self.num_samples - 1
        if least < 0 or (largest > last and not hasattr(self._dataset, "epoch_order")):
            raise UserError(
                f"the order of epoch {epoch} has indices from {least} to {largest}, but the dataset's are 0 "
                f"to {last}"
            )
        return order

    def order_hash(self) -> str | None:
        """Return a hash of the first epoch's order, to be compared across ranks; None for torch.randperm."""
        if self._is_permutation:
            return None
        order = self.order_of(0)
        if not order.equal(self.order_of(0)):
            raise UserError(
                "the order of an epoch differs if it is computed again, so a resumed run would read "
                "different samples; compute it only from the dataset and the given generator"
            )
        return hashlib.blake2b(order.numpy().data, digest_size=8).hexdigest()

    def __iter__(self) -> Iterator[Request]:
        order, requests = self.order_of(self.epoch), super().__iter__()
        draws = order if self._is_permutation else draws_of(order)
        for request in itertools.islice(requests, len(self)):
            own = slice(request.numbers.start, request.numbers.stop, request.numbers.step)
            yield replace(request, numbers=order[own].tolist(), draws=draws[own].tolist())


def draws_of(order: Tensor) -> Tensor:
    """Return a number for each sample of an epoch, so that copies of a sample get different random numbers.

    For the first occurrence of an index in the epoch, the number is the index; for each repetition, it is
    another number. Without repetitions, `order` itself is returned.
    """
    ordered = np.sort(order.numpy())  # four times as fast as torch's
    if (ordered[1:] != ordered[:-1]).all():
        return order
    by_index, positions = order.sort(stable=True)
    repetition = torch.arange(len(order)) - torch.searchsorted(by_index, by_index)
    return order.scatter(0, positions, by_index + (repetition << 40))  # indices are far below 2^40
