"""Which samples each rank reads, and in which order: the harness's contract on the data.

Training: an epoch e is a permutation drawn from (seed, e) alone, and a batch its next B samples, so a run
on 1, 2 or 8 ranks, stopped and resumed or not, sees the same batches. A run resumed with another B goes on
at the very next sample. A remainder of less than B samples at the end of an epoch is not read.
Evaluation: every sample exactly once, with as many batches on each rank as on any other.
"""

from collections.abc import Iterator, Sized

from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from trainer.data.batch import BatchSplit
from trainer.errors import UserError


class TrainSampler(Sampler[tuple[int, list[int]]]):
    """Yields (epoch, indices) for each micro-batch of this replica, from ``first_sample`` of ``epoch`` on.

    Of each batch, replica r takes the items r::R, as DistributedSampler hands them out. The epoch travels
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
        self.batch, self.replica = batch, replica
        self.num_samples = len(dataset)
        self.epoch = 0
        self.first_sample = 0
        self._shuffled: DistributedSampler[int] = DistributedSampler(
            dataset,  # type: ignore[arg-type]
            batch.num_replicas,
            replica,
            shuffle=True,
            seed=seed,
        )

    def __len__(self) -> int:
        """Micro-batches that the next iteration yields."""
        return (self.num_samples - self.first_sample) // self.batch.global_size * self.batch.accumulation

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        self._shuffled.set_epoch(self.epoch)
        # first_sample need be no multiple of R: what this replica reads begins with the q-th item of rank r.
        q, r = divmod(self.first_sample + self.replica, self.batch.num_replicas)
        self._shuffled.rank = r
        indices = list(self._shuffled)
        epoch, micro_size = self.epoch, self.batch.micro_size
        for start in range(q, q + len(self) * micro_size, micro_size):
            yield epoch, indices[start : start + micro_size]


class EvalSampler(Sampler[list[int]]):
    """Yields batches of the samples r::R in order; a rank that has run out yields empty lists.

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
