"""Which samples each rank reads, and in which order: the harness's contract on the data.

Training: the batch of step s in epoch e is the slice [s*B, (s+1)*B) of a permutation drawn from (seed, e)
alone, so a run on 1, 2 or 8 ranks, stopped and resumed or not, sees the same batches.
Evaluation: every sample exactly once, with as many batches on each rank as on any other.
"""

from collections.abc import Iterator, Sized

from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from trainer.errors import UserError


class TrainSampler(Sampler[tuple[int, list[int]]]):
    """Yields (epoch, indices) for each micro-batch of this replica, from ``first_step`` of ``epoch`` on.

    DistributedSampler hands replica r the items r::R of the permutation; its next B/R items therefore lie in
    the slice of the global batch. The epoch travels with the indices because worker processes, which live for
    the whole run, need it to draw each sample's random numbers.

    Raises:
        UserError: the dataset is smaller than one global batch.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        local_batch_size: int,
        micro_batch_size: int,
        num_replicas: int,
        replica: int,
        seed: int,
    ) -> None:
        assert local_batch_size % micro_batch_size == 0
        global_batch_size = local_batch_size * num_replicas
        if len(dataset) < global_batch_size:
            raise UserError(
                f"the training data holds {len(dataset)} samples, fewer than one global batch of "
                f"{global_batch_size} ({num_replicas} replicas x {local_batch_size}); "
                "lower train.global_batch_size or use fewer ranks"
            )
        self.steps_per_epoch = len(dataset) // global_batch_size
        self.local_batch_size = local_batch_size
        self.micro_batch_size = micro_batch_size
        self.epoch = 0
        self.first_step = 0
        self._shuffled: DistributedSampler[int] = DistributedSampler(
            dataset,  # type: ignore[arg-type]
            num_replicas,
            replica,
            shuffle=True,
            seed=seed,
            drop_last=True,
        )

    def __len__(self) -> int:
        """Micro-batches that the next iteration yields."""
        return (self.steps_per_epoch - self.first_step) * (self.local_batch_size // self.micro_batch_size)

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        self._shuffled.set_epoch(self.epoch)
        indices = list(self._shuffled)
        epoch, end = self.epoch, self.steps_per_epoch * self.local_batch_size
        for start in range(self.first_step * self.local_batch_size, end, self.micro_batch_size):
            yield epoch, indices[start : start + self.micro_batch_size]


class EvalSampler(Sampler[list[int]]):
    """Yields batches of the samples r::R in order; a rank that has run out yields empty lists.

    Every rank yields the same number of batches, so that a model whose forward pass is collective (FSDP)
    stays in step; no sample is padded or repeated.
    """

    def __init__(self, dataset: Sized, *, batch_size: int, num_replicas: int, replica: int) -> None:
        self.batch_size = batch_size
        self.indices = range(replica, len(dataset), num_replicas)
        longest = len(range(0, len(dataset), num_replicas))
        self.num_batches = -(-longest // batch_size)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, self.num_batches * self.batch_size, self.batch_size):
            yield list(self.indices[start : start + self.batch_size])
