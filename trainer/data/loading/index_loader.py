"""Loaders of data that is read by index, in an order that the harness draws."""

import copy
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from trainer.data.loading.base import Batches, LoaderSettings, Share, batches_of, raise_errors
from trainer.data.loading.batch import BatchSplit
from trainer.data.loading.collation import sample_name
from trainer.data.loading.reader import EvalReader, TrainReader
from trainer.data.loading.sampler import EvalSampler, TrainSampler
from trainer.data.order import Order, shuffled
from trainer.errors import UserError
from trainer.nested import leaves


class IndexTrainLoader:
    """A TrainLoader of data read by index.

    Raises:
        UserError: the dataset is smaller than a global batch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        settings: LoaderSettings,
        batch: BatchSplit,
        share: Share,
        order: Order = shuffled,
    ) -> None:
        self._sampler = TrainSampler(
            dataset,  # type: ignore[arg-type]
            batch,
            replica=share.replica,
            seed=share.seed,
            order=order,
        )
        self._reader = TrainReader(
            dataset, share.seed, settings.on_bad_sample, share.heartbeat, share.collate
        )
        self._loader = batches_of(self._reader, self._sampler, settings, share)

        self.num_samples: int | None = self._reader.num_samples
        self.steps_per_epoch: int | None = self._sampler.steps_per_epoch

    @property
    def num_skipped(self) -> int:
        return self._reader.num_skipped

    def epoch(self, epoch: int, first_sample: int = 0) -> Batches:
        """Samples before ``first_sample`` are not read."""
        self._sampler.epoch, self._sampler.first_sample = epoch, first_sample
        return _Counted(raise_errors(self._loader), len(self._sampler), self._sampler.batch.accumulation)

    def not_finite(self, epoch: int, first_sample: int) -> str | None:
        sampler = copy.copy(self._sampler)  # the loader still draws from its own
        sampler.epoch, sampler.first_sample = epoch, first_sample
        for _, indices in itertools.islice(sampler, sampler.batch.accumulation):
            for index in indices:
                for leaf in leaves(self._reader.__getitems__((epoch, [index]))):
                    if isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.isfinite().all():
                        return sample_name(self._reader.dataset, index)
        return None

    def order_hash(self) -> str | None:
        return self._sampler.order_hash()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def resume(self, states: list[dict[str, Any]]) -> None:
        if any(states):
            raise UserError("the checkpoint is of training on a stream, and this data is read by index")


class IndexEvalLoader:
    """An EvalLoader of data read by index."""

    def __init__(
        self, dataset: Dataset[Any], settings: LoaderSettings, batch: BatchSplit, share: Share
    ) -> None:
        if len(dataset) == 0:  # type: ignore[arg-type]
            raise UserError("the evaluation data is empty; set train.eval_every_epochs=0 to train without it")
        sampler = EvalSampler(
            dataset,  # type: ignore[arg-type]
            batch,
            replica=share.replica,
        )
        self.batch_size = sampler.batch_size
        self._reader = EvalReader(dataset, share.seed, settings.on_bad_sample, share.heartbeat, share.collate)
        self._loader = batches_of(self._reader, sampler, settings, share)

        self.num_samples: int | None = self._reader.num_samples

    @property
    def num_skipped(self) -> int:
        return self._reader.num_skipped

    def __iter__(self) -> Iterator[tuple[Any, list[int]]]:
        return raise_errors(self._loader)


class _Counted(Batches):
    """Yields the next ``left`` micro-batches."""

    def __init__(self, batches: Iterator[Any], left: int, accumulation: int) -> None:
        self._batches, self._left, self._accumulation = batches, left, accumulation
        self._ahead = deque[Any]()

    @property
    def data_left(self) -> bool:  # type: ignore[override]
        return self._left > 0 or not self._accumulation  # one that reads nothing leaves the end to others

    def ahead(self) -> list[Any]:
        if not self._ahead:
            self._ahead.extend(itertools.islice(self._batches, self._accumulation))
        return list(self._ahead)

    def __next__(self) -> Any:
        batch = self._ahead.popleft() if self._ahead else next(self._batches)
        self._left -= 1
        return batch
