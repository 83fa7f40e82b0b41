"""How a global batch is split over replicas and micro-batches."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.config import check_batch_sizes
from trainer.errors import UserError


@dataclass(frozen=True)
class BatchSplit:
    """global_batch_size = num_replicas x micro_batch_size x accumulation; sizes in samples.

    With `chunks`, each micro-batch is one chunk of `train.exact`, consecutive samples, and a replica may have
    one more or less than another. A rank that has no share of the batch, such as a parameter server, has an
    `accumulation` of 0.
    """

    global_batch_size: int
    num_replicas: int
    micro_batch_size: int
    accumulation: int  # micro-batches whose gradients this process sums in a step
    chunks: range | None = None  # those of this process

    @property
    def local_size(self) -> int:
        """The largest number of samples of a global batch that a replica takes."""
        return self.micro_batch_size * self._most

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step, over all replicas."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def fewer(self) -> int:
        """By how many micro-batches of a step this process has fewer than the one with the most."""
        return self._most - self.accumulation

    @property
    def _most(self) -> int:
        return -(-self.num_micro_batches // self.num_replicas)

    def first_micro_batch(self, replica: int) -> int:
        """The number within the step of the first micro-batch of `replica`, which is this process's."""
        return replica * self.accumulation if self.chunks is None else self.chunks.start

    def micro_batches(self, first: int, replica: int, held_out: bool = False) -> Iterator[tuple[int, range]]:
        """For each micro-batch from sample `first` on: the first number of all replicas, and this one's.

        Replica r takes the samples r::R, as torch's DistributedSampler does; or the next of its chunks.

        Args:
            held_out: each replica yields the same number of micro-batches for each first number.
        """
        size = self.micro_batch_size
        if self.chunks is None:
            for begin in itertools.count(first, size * self.num_replicas):
                yield begin, range(begin + replica, begin + size * self.num_replicas, self.num_replicas)
        else:
            own = [range(chunk * size, (chunk + 1) * size) for chunk in self.chunks]
            own += [range(0)] * (self.fewer if held_out else 0)
            for begin in itertools.count(first, self.global_batch_size):
                for part in own:
                    yield begin, range(begin + part.start, begin + part.stop) if part else part

    def __str__(self) -> str:
        if self.chunks is not None:
            return f"{self.global_batch_size} = {self.num_micro_batches} chunks x {self.micro_batch_size}"
        parts = f"{self.num_replicas} replicas x {self.micro_batch_size} x {self._most} accumulated"
        return f"{self.global_batch_size} = {parts}"


def split_chunks(
    global_batch_size: int, micro_batch_size: int | None, num_chunks: int, num_replicas: int, own: range
) -> BatchSplit:
    """Split into chunks, of which this process computes `own`.

    Raises:
        UserError: a size does not divide evenly; the message names the nearest that does.
    """
    size = global_batch_size // num_chunks
    if global_batch_size % num_chunks:
        most = min(global_batch_size, 1024)
        divisors = [chunks for chunks in range(1, most + 1) if global_batch_size % chunks == 0]
        chunks = min(divisors, key=lambda chunks: abs(chunks - num_chunks))
        nearest = max(1, round(global_batch_size / num_chunks)) * num_chunks
        raise UserError(
            f"train.exact is {num_chunks}, which does not divide train.global_batch_size="
            f"{global_batch_size}; nearest that does: train.exact={chunks}, or "
            f"train.global_batch_size={nearest}"
        )
    if micro_batch_size not in (None, size):
        raise UserError(
            f"train.micro_batch_size is {micro_batch_size}, but train.exact={num_chunks} computes chunks of "
            f"{size} samples; set it to {size}, or null"
        )
    return BatchSplit(global_batch_size, num_replicas, size, len(own), own)


def split_batch(global_batch_size: int, micro_batch_size: int | None, num_replicas: int) -> BatchSplit:
    """Split evenly; without a `micro_batch_size`, each replica's share is one micro-batch.

    Raises:
        UserError: a size does not divide evenly; the message names the nearest that does.
    """
    check_batch_sizes(global_batch_size, micro_batch_size, num_replicas)
    local_size = global_batch_size // num_replicas
    micro_batch_size = micro_batch_size or local_size
    return BatchSplit(global_batch_size, num_replicas, micro_batch_size, local_size // micro_batch_size)
