"""Which samples each rank reads, and in which order.

Training: an epoch e is a permutation drawn from (seed, e) alone, and a batch is its next B samples, so a run
on 1, 2 or 8 ranks, resumed or not, sees the same batches. A run resumed with another B continues with the
very next sample. A remainder of less than B samples at the end of an epoch is not trained on.
A stream keeps its own order; the slices are cut from it in the same way.
Evaluation: every sample exactly once, with the same number of batches on each rank.
"""

import itertools
from collections.abc import Callable, Iterator, Sized

import torch
from torch.utils.data import Sampler

from trainer.data.loading.batch import BatchSplit
from trainer.data.loading.stream_reader import Request
from trainer.errors import UserError


class TrainSampler(Sampler[tuple[int, list[int]]]):
    """Yields (epoch, indices) for each micro-batch of this replica, from ``first_sample`` of ``epoch`` on.

    Of each batch, replica r takes the items r::R, as torch's DistributedSampler does. The epoch is yielded
    with the indices because worker processes, which live for the whole run, need it to draw each sample's
    random numbers.

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
    ) -> None:
        if len(dataset) < batch.global_size:
            raise UserError(
                f"the training data holds {len(dataset)} samples, fewer than one global batch of "
                f"{batch.global_size} ({batch.num_replicas} replicas x {batch.local_size}); "
                "lower train.global_batch_size or use fewer ranks"
            )
        self.steps_per_epoch = len(dataset) // batch.global_size
        self.batch, self.replica, self.seed = batch, replica, seed
        self.num_samples = len(dataset)
        self.epoch = 0
        self.first_sample = 0
        self.parts: Callable[[], Iterator[tuple[int, int]]] | None = None

    def __len__(self) -> int:
        """Micro-batches of the next iteration."""
        return (self.num_samples - self.first_sample) // self.batch.global_size * self.batch.accumulation

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        # A tensor, not a list: data=tokens has a billion numbers.
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.num_samples, generator=generator)
        epoch, batch = self.epoch, self.batch
        for step, replica in self._parts():
            numbers = _numbers(self.first_sample + step * batch.global_size, batch, replica)
            for _, of_micro_batch in itertools.islice(numbers, batch.accumulation):
                yield epoch, order[of_micro_batch.start : of_micro_batch.stop : of_micro_batch.step].tolist()

    def _parts(self) -> Iterator[tuple[int, int]]:
        """Yield (step, replica), the shares to be read next; by default this replica's share of each step."""
        if self.parts is not None:
            return self.parts()
        return ((step, self.replica) for step in range(len(self) // self.batch.accumulation))


class TrainRequests(Sampler[Request]):
    """The counterpart of TrainSampler for a stream, whose end is unknown: it never ends.

    Before the first micro-batch, each data worker drops what precedes ``first_sample``, until ``caught_up``.
    """

    def __init__(self, batch: BatchSplit, replica: int, num_shards: int) -> None:
        self.batch, self.replica, self.num_shards = batch, replica, num_shards
        self.reading = self.epoch = self.first_sample = 0
        self.caught_up = False

    def __iter__(self) -> Iterator[Request]:
        reading, epoch, first, step = self.reading, self.epoch, self.first_sample, self.batch.num_replicas
        in_each_shard = range(first + self.replica, first + self.replica + step * self.num_shards, step)
        while not self.caught_up:
            yield Request(reading, epoch, first, in_each_shard, catch_up=True)
        for begin, numbers in _numbers(first, self.batch, self.replica):
            yield Request(reading, epoch, begin, numbers)


def _numbers(first: int, batch: BatchSplit, replica: int) -> Iterator[tuple[int, range]]:
    """For each micro-batch from sample ``first`` on: the first number of all replicas, and this one's."""
    micro = batch.micro_size * batch.num_replicas
    for begin in itertools.count(first, micro):
        yield begin, range(begin + replica, begin + micro, batch.num_replicas)


class EvalSampler(Sampler[list[int]]):
    """Yields batches of the samples r::R in order; a rank without samples left yields empty lists.

    Every rank yields the same number of batches, so that a model whose forward pass is collective (FSDP)
    stays in step; no sample is padded or repeated.
    """

    def __init__(self, dataset: Sized, batch: BatchSplit, *, replica: int) -> None:
        self.batch_size = batch.micro_size
        self.indices = range(replica, len(dataset), batch.num_replicas)
        longest = len(range(0, len(dataset), batch.num_replicas))
        self.num_batches = -(-longest // self.batch_size)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, self.num_batches * self.batch_size, self.batch_size):
            yield list(self.indices[start : start + self.batch_size])


class EvalRequests(Sampler[Request]):
    """The counterpart of EvalSampler for a stream: it never ends."""

    def __init__(self, batch: BatchSplit, replica: int) -> None:
        self.batch, self.replica, self.reading = batch, replica, 0

    def __iter__(self) -> Iterator[Request]:
        self.reading += 1
        reading = self.reading
        for begin, numbers in _numbers(0, self.batch, self.replica):
            yield Request(reading, 0, begin, numbers)
