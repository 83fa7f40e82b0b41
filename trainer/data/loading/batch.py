"""How a global batch is split over replicas and micro-batches."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.errors import UserError


@dataclass(frozen=True)
class BatchSplit:
    """global_batch_size = num_replicas x micro_batch_size x accumulation; sizes in samples.

    A rank that has no share of the batch, such as a parameter server, has an `accumulation` of 0.
    """

    global_batch_size: int
    num_replicas: int
    micro_batch_size: int
    accumulation: int  # micro-batches whose gradients this process sums in a step

    @property
    def local_size(self) -> int:
        """Samples of a global batch that a replica takes, or the most."""
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
        """The number within the step of the first micro-batch of `replica`."""
        return replica * self.accumulation

    def micro_batches(self, first: int, replica: int) -> Iterator[tuple[int, range]]:
        """For each micro-batch from sample `first` on: the first number of all replicas, and this one's.

        Of each, replica r takes the items r::R, as torch's DistributedSampler does.
        """
        micro = self.micro_batch_size * self.num_replicas
        for begin in itertools.count(first, micro):
            yield begin, range(begin + replica, begin + micro, self.num_replicas)

    def held_out(self, replica: int) -> Iterator[tuple[int, range]]:
        """`micro_batches` for evaluation; each replica yields as many for each first number."""
        return self.micro_batches(0, replica)

    def __str__(self) -> str:
        parts = f"{self.num_replicas} replicas x {self.micro_batch_size} x {self._most} accumulated"
        return f"{self.global_batch_size} = {parts}"


@dataclass(frozen=True)
class LeafSplit(BatchSplit):
    """A global batch of `num_leaves` leaves of `micro_batch_size` consecutive samples, one micro-batch each.

    `accumulation` and `first_leaf` are those of this process: another may have one leaf more or less.
    """

    num_leaves: int = 1
    first_leaf: int = 0

    def first_micro_batch(self, replica: int) -> int:
        return self.first_leaf

    def micro_batches(self, first: int, replica: int) -> Iterator[tuple[int, range]]:
        for begin in itertools.count(first, self.global_batch_size):
            for leaf in range(self.first_leaf, self.first_leaf + self.accumulation):
                yield begin, self._samples(begin, leaf)

    def held_out(self, replica: int) -> Iterator[tuple[int, range]]:
        for begin in itertools.count(0, self.global_batch_size):
            for number in range(self._most):
                own = number < self.accumulation
                yield begin, self._samples(begin, self.first_leaf + number) if own else range(0)

    def _samples(self, begin: int, leaf: int) -> range:
        return range(begin + leaf * self.micro_batch_size, begin + (leaf + 1) * self.micro_batch_size)

    def __str__(self) -> str:
        return f"{self.global_batch_size} = {self.num_leaves} leaves x {self.micro_batch_size}"


def split_leaves(
    global_batch_size: int, micro_batch_size: int | None, num_leaves: int, num_replicas: int, own: range
) -> LeafSplit:
    """Split into leaves, of which this process computes `own`.

    Raises:
        UserError: a size does not divide evenly; the message names the nearest that does.
    """
    size = global_batch_size // num_leaves
    if global_batch_size % num_leaves:
        most = min(global_batch_size, 1024)
        divisors = [leaves for leaves in range(1, most + 1) if global_batch_size % leaves == 0]
        leaves = min(divisors, key=lambda leaves: abs(leaves - num_leaves))
        nearest = max(1, round(global_batch_size / num_leaves)) * num_leaves
        raise UserError(
            f"train.exact is {num_leaves}, which does not divide train.global_batch_size="
            f"{global_batch_size}; nearest that does: train.exact={leaves}, or "
            f"train.global_batch_size={nearest}"
        )
    if micro_batch_size not in (None, size):
        raise UserError(
            f"train.micro_batch_size is {micro_batch_size}, but train.exact={num_leaves} computes leaves of "
            f"{size} samples; set it to {size}, or null"
        )
    return LeafSplit(global_batch_size, num_replicas, size, len(own), num_leaves, own.start)


def split_batch(global_batch_size: int, micro_batch_size: int | None, num_replicas: int) -> BatchSplit:
    """Split evenly; without a `micro_batch_size`, each replica's share is one micro-batch.

    Raises:
        UserError: a size does not divide evenly; the message names the nearest that does.
    """
    if global_batch_size % num_replicas:
        below = global_batch_size // num_replicas * num_replicas
        above = below + num_replicas
        nearest = above if below == 0 or above - global_batch_size < global_batch_size - below else below
        raise UserError(
            f"train.global_batch_size is {global_batch_size}, which does not divide over {num_replicas} "
            f"replicas; nearest that does: {nearest}"
        )
    local_size = global_batch_size // num_replicas
    micro_batch_size = micro_batch_size or local_size
    if local_size % micro_batch_size:
        divisors = [size for size in range(1, local_size + 1) if local_size % size == 0]
        raise UserError(
            f"train.micro_batch_size is {micro_batch_size}, which does not divide the {local_size} samples "
            f"that each of {num_replicas} replicas takes of train.global_batch_size={global_batch_size}; "
            f"nearest that does: {min(divisors, key=lambda size: abs(size - micro_batch_size))}"
        )
    return BatchSplit(global_batch_size, num_replicas, micro_batch_size, local_size // micro_batch_size)
