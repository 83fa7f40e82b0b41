"""The split of a global batch over replicas and micro-batches."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.config import check_batch_sizes
from trainer.errors import UserError


@dataclass(frozen=True)
class BatchSplit:
    """Sizes in samples: global_batch_size = num_replicas x micro_batch_size x accumulation.

    With `chunks`, each micro-batch is one chunk of `train.exact`, a range of consecutive samples, and some
    replicas may have one micro-batch more. For a rank without samples, such as a parameter server,
    `accumulation` is 0.
    """

    global_batch_size: int
    num_replicas: int
    micro_batch_size: int
    accumulation: int  # micro-batches whose gradients this process sums in a step
    chunks: range | None = None  # the numbers of this process's chunks

    @property
    def local_size(self) -> int:
        """The largest number of samples of a global batch that any replica gets."""
        return self.micro_batch_size * self._most

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches per step, over all replicas."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def fewer(self) -> int:
        """The number of micro-batches per step by which this process has fewer than the busiest one."""
        return self._most - self.accumulation

    @property
    def _most(self) -> int:
        return -(-self.num_micro_batches // self.num_replicas)

    def first_micro_batch(self, replica: int) -> int:
        """Return the index, within a step, of the first micro-batch of `replica`."""
        return replica * self.accumulation if self.chunks is None else self.chunks.start

    def micro_batches(self, first: int, replica: int, held_out: bool = False) -> Iterator[tuple[int, range]]:
        """Yield, for each micro-batch from `first` on, its first sample over all replicas and own samples.

        Replica r of R gets the samples r::R, as in torch's DistributedSampler, or with `chunks`, its chunks.
        With `held_out`, all replicas yield the same number of micro-batches; some may be empty.
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
            factors = [(self.num_micro_batches, "chunk"), (self.micro_batch_size, "sample")]
        else:
            factors = [(self.num_replicas, "rank"), (self.micro_batch_size, "sample")]
            factors.append((self._most, "accumulation step"))
        parts = " x ".join(f"{number} {noun}{'s' * (number != 1)}" for number, noun in factors)
        return f"{self.global_batch_size} = {parts}"


def split_chunks(
    global_batch_size: int, micro_batch_size: int | None, num_chunks: int, num_replicas: int, own: range
) -> BatchSplit:
    """Split a global batch into chunks, of which this process computes `own`."""
    size = global_batch_size // num_chunks
    if global_batch_size % num_chunks:
        most = min(global_batch_size, 1024)
        divisors = [chunks for chunks in range(1, most + 1) if global_batch_size % chunks == 0]
        chunks = min(divisors, key=lambda chunks: abs(chunks - num_chunks))
        nearest = max(1, round(global_batch_size / num_chunks)) * num_chunks
        raise UserError(
            f"train.global_batch_size={global_batch_size} is not divisible by train.exact={num_chunks}; the "
            f"nearest values that work are train.exact={chunks}, or train.global_batch_size={nearest}"
        )
    if micro_batch_size not in (None, size):
        raise UserError(
            f"train.micro_batch_size={micro_batch_size}, but with train.exact={num_chunks} a micro-batch is "
            f"one chunk of {size} samples; set train.micro_batch_size={size}, or null"
        )
    return BatchSplit(global_batch_size, num_replicas, size, len(own), own)


def split_batch(global_batch_size: int, micro_batch_size: int | None, num_replicas: int) -> BatchSplit:
    """Split a global batch evenly; with `micro_batch_size=None`, each replica gets one micro-batch."""
    check_batch_sizes(global_batch_size, micro_batch_size, num_replicas)
    local_size = global_batch_size // num_replicas
    micro_batch_size = micro_batch_size or local_size
    return BatchSplit(global_batch_size, num_replicas, micro_batch_size, local_size // micro_batch_size)
