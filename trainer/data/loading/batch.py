"""How a global batch is split over replicas and micro-batches."""

from dataclasses import dataclass

from trainer.errors import UserError


@dataclass(frozen=True)
class BatchSplit:
    """global_size = num_replicas x micro_size x accumulation; sizes in samples."""

    global_size: int
    num_replicas: int
    micro_size: int
    accumulation: int  # micro-batches whose gradients each replica sums in a step

    @property
    def local_size(self) -> int:
        """Samples of a global batch that each replica takes."""
        return self.micro_size * self.accumulation

    @property
    def num_parts(self) -> int:
        """Micro-batches of a step, over all replicas."""
        return self.num_replicas * self.accumulation

    def first_part(self, replica: int) -> int:
        """The number within the step of the first micro-batch of `replica`."""
        return replica * self.accumulation

    def __str__(self) -> str:
        parts = f"{self.num_replicas} replicas x {self.micro_size} x {self.accumulation} accumulated"
        return f"{self.global_size} = {parts}"


def split_batch(global_size: int, micro_size: int | None, num_replicas: int) -> BatchSplit:
    """Split evenly; without a `micro_size`, each replica's share is one micro-batch.

    Raises:
        UserError: a size does not divide evenly; the message names the nearest that does.
    """
    if global_size % num_replicas:
        below = global_size // num_replicas * num_replicas
        above = below + num_replicas
        nearest = above if below == 0 or above - global_size < global_size - below else below
        raise UserError(
            f"train.global_batch_size is {global_size}, which does not divide over {num_replicas} replicas; "
            f"nearest that does: {nearest}"
        )
    local_size = global_size // num_replicas
    micro_size = micro_size or local_size
    if local_size % micro_size:
        divisors = [size for size in range(1, local_size + 1) if local_size % size == 0]
        raise UserError(
            f"train.micro_batch_size is {micro_size}, which does not divide the {local_size} samples that "
            f"each of {num_replicas} replicas takes of train.global_batch_size={global_size}; nearest that "
            f"does: {min(divisors, key=lambda size: abs(size - micro_size))}"
        )
    return BatchSplit(global_size, num_replicas, micro_size, local_size // micro_size)
