"""Which samples each rank reads, and in which order.

Training: an epoch e is an order (trainer.data.order) drawn from (seed, e) alone, and a batch is its next B
samples, so a run on 1, 2 or 8 ranks, resumed or not, sees the same batches. A run resumed with another B
continues with the very next sample. A remainder of less than B samples at the end of an epoch is not trained
on.
A stream keeps its own order; the slices are cut from it in the same way.
Evaluation: every sample exactly once, with the same number of batches on each rank.
"""

import copy
import hashlib
import itertools
from collections.abc import Iterator, Sized

import torch
from torch import Tensor
from torch.utils.data import Sampler

from trainer.data.loading.batch import BatchSplit
from trainer.data.loading.reader import generators_kept, seed_generators
from trainer.data.loading.stream_reader import Request
from trainer.data.order import Order, shuffled
from trainer.errors import UserError


class TrainSampler(Sampler[tuple[int, list[int]]]):
    """Yields (epoch, indices) for each micro-batch of this replica, from ``first_sample`` of ``epoch`` on.

    The epoch is yielded with the indices because worker processes, which live for the whole run, need it to
    draw each sample's random numbers.

    Raises:
        UserError: the dataset is smaller than one global batch.
    """

    def __init__(
        self,
        dataset: Sized,
        batch: BatchSplit,
        *,
        replica: int,
        seed: int,
        order: Order = shuffled,
    ) -> None:
        if len(dataset) < batch.global_batch_size:
            raise UserError(
                f"the training data holds {len(dataset)} samples, fewer than one global batch of "
                f"{batch.global_batch_size} ({batch.num_replicas} replicas x {batch.local_size}); "
                "lower train.global_batch_size or use fewer ranks"
            )
        self.steps_per_epoch = len(dataset) // batch.global_batch_size
        self.batch, self.replica, self.seed = batch, replica, seed
        self.num_samples = len(dataset)
        self._dataset, self._order = dataset, order
        self.epoch = 0
        self.first_sample = 0

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
        with generators_kept():  # from which an order may draw as well: on every rank the same numbers
            seed_generators(self.seed, epoch, self.num_samples)
            order = self._order(self._dataset, generator)
        if not isinstance(order, Tensor) or order.dtype != torch.int64:
            kind = f"of {order.dtype}" if isinstance(order, Tensor) else f"a {type(order).__name__}"
            raise UserError(f"the order of an epoch is {kind}, but must be a tensor of torch.int64")
        if order.shape != (self.num_samples,):
            raise UserError(
                f"the order of an epoch has the shape {tuple(order.shape)}, but must be an index for each of "
                f"{self.num_samples} samples"
            )
        return order

    def order_hash(self) -> str | None:
        """A hash of the first epoch's order, which must be equal on all ranks; None for torch's permutation.

        Raises:
            UserError: the order has an index of no sample, is another one in a second call, or has others
                than the `epoch_order` of a dataset that draws its samples.
        """
        if self._is_permutation:
            return None
        order = self.order_of(0)
        if (least := int(order.min())) < 0:
            raise UserError(f"the order of an epoch has the index {least}, but the first sample has 0")
        last = self.num_samples - 1
        if (largest := int(order.max())) > last and not hasattr(self._dataset, "epoch_order"):
            raise UserError(f"the order of an epoch has the index {largest}, but the last sample has {last}")
        if not order.equal(self.order_of(0)):
            raise UserError(
                "the order of an epoch is another one in a second call, so a resumed run would read other "
                "samples: let it follow from the dataset and the generator alone"
            )
        if getattr(self._dataset, "draws", False) and not self._keeps_to_drawn():
            raise UserError(
                "data.order does not keep to the samples that the mixture draws for an epoch, and would "
                "train on others: call trainer.data.order.shuffled(dataset, generator), and return its "
                "indices in another order; or set data.order=null"
            )
        return hashlib.blake2b(order.numpy().data, digest_size=8).hexdigest()

    def _keeps_to_drawn(self) -> bool:
        """Whether the order calls the dataset's `epoch_order`, and gives no other indices."""
        drawn, sampler, dataset = [], copy.copy(self), copy.copy(self._dataset)
        own = dataset.epoch_order  # type: ignore[attr-defined]

        def noting(generator: torch.Generator) -> Tensor:
            drawn.append(own(generator))
            return drawn[-1]

        dataset.epoch_order = noting  # type: ignore[attr-defined]
        sampler._dataset = dataset
        order = sampler.order_of(0)
        return bool(drawn) and bool(torch.isin(order, torch.cat(drawn)).all())

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        order = self.order_of(self.epoch)
        epoch, batch = self.epoch, self.batch
        numbers = batch.micro_batches(self.first_sample, self.replica)
        for _, of_micro_batch in itertools.islice(numbers, len(self)):
            yield epoch, order[of_micro_batch.start : of_micro_batch.stop : of_micro_batch.step].tolist()


class TrainRequests(Sampler[Request]):
    """The counterpart of TrainSampler for a stream, whose end is unknown: it never ends.

    Before the first micro-batch, each data worker drops what precedes ``first_sample``, until ``caught_up``.
    """

    def __init__(self, batch: BatchSplit, replica: int, num_shards: int) -> None:
        self.batch, self.replica, self.num_shards = batch, replica, num_shards
        self.reading = self.epoch = self.first_sample = 0
        self.caught_up = False

    def __iter__(self) -> Iterator[Request]:
        reading, epoch, first = self.reading, self.epoch, self.first_sample
        in_each_shard = self.batch.of_shards(first, self.replica, self.num_shards)
        while not self.caught_up:
            yield Request(reading, epoch, first, in_each_shard, catch_up=True)
        for begin, numbers in self.batch.micro_batches(first, self.replica):
            yield Request(reading, epoch, begin, numbers)


class EvalSampler(Sampler[list[int]]):
    """Yields batches of this replica's samples in order; a rank without samples left yields empty lists.

    Every rank yields the same number of batches, so that a model whose forward pass is collective (FSDP)
    stays in step; no sample is padded or repeated.
    """

    def __init__(self, dataset: Sized, batch: BatchSplit, *, replica: int) -> None:
        self.batch, self.replica, self.num_samples = batch, replica, len(dataset)
        self.batch_size = batch.micro_batch_size

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[list[int]]:
        for begin, numbers in self.batch.held_out(self.replica):
            if begin >= self.num_samples:
                return
            yield list(range(numbers.start, min(numbers.stop, self.num_samples), numbers.step))


class EvalRequests(Sampler[Request]):
    """The counterpart of EvalSampler for a stream: it never ends."""

    def __init__(self, batch: BatchSplit, replica: int) -> None:
        self.batch, self.replica, self.reading = batch, replica, 0

    def __iter__(self) -> Iterator[Request]:
        self.reading += 1
        reading = self.reading
        for begin, numbers in self.batch.held_out(self.replica):
            yield Request(reading, 0, begin, numbers)
