"""Loaders, which live for the whole run: requests and a reader, joined by torch's DataLoader for workers.

`train_loader` and `eval_loader` choose between data read by index and streams; other code need not know which
it is.
"""

import copy
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from trainer.accelerator import can_pin
from trainer.config import DataConfig
from trainer.data.loading.batch import BatchSplit
from trainer.data.loading.reader import (
    Answer,
    EvalReader,
    Reader,
    Request,
    Share,
    TrainReader,
    name_of,
    sample_name,
)
from trainer.data.loading.sampler import IndexRequests, Requests
from trainer.data.loading.stream_reader import EvalStreamReader, StreamPosition, TrainStreamReader
from trainer.data.loading.worker import WorkerError, begin_worker, keep_sockets_short
from trainer.data.order import Order, shuffled
from trainer.data.stream import is_stream
from trainer.errors import UserError
from trainer.tensors.nested import leaves

log = logging.getLogger(__name__)


class Batches:
    """The rest of an epoch: the answers of a reader, as many to a step as it has micro-batches.

    Attributes:
        accumulation: this rank's micro-batches of a step.
        position: of a stream, after the micro-batches taken so far.
    """

    def __init__(
        self,
        answers: Iterator[Answer],
        accumulation: int,
        left: int | None = None,
        position: StreamPosition = StreamPosition(),  # noqa: B008, it is frozen
    ) -> None:
        """``left``: how many micro-batches follow; None: only the next step itself tells, as of a stream."""
        self._answers, self.accumulation, self._left, self.position = answers, accumulation, left, position
        self._next: list[Answer] = []

    @property
    def data_left(self) -> bool:
        """Whether this rank has data for another step."""
        have = len(self.ahead()) if self._left is None else self._left
        return have >= self.accumulation  # a rank that reads nothing leaves the end to others

    def ahead(self) -> list[Any]:
        """The micro-batches of the next step, read now and kept. Called between steps."""
        if not self._next:
            self._next = list(itertools.islice(self._answers, self.accumulation))
        return [answer.batch for answer in self._next]

    def first_read(self) -> Mapping[int, int]:
        """Hashes of samples that are the same on all ranks, by their numbers, as this rank has read them."""
        return {number: value for answer in self._next for number, value in answer.first.items()}

    def take(self) -> list[Any]:
        """The micro-batches of the next step; none if this rank's share of it has none."""
        batches = self.ahead()
        read, self._next = self._next, []
        for answer in read:
            if answer.belonging:
                self.position = self.position.moved_on(answer.belonging)
        if self._left is not None:
            self._left -= len(read)
        else:
            self.ahead()  # while it is known that this rank waits for data
        return batches

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches one by one, taken a step at a time."""
        while self.data_left and (step := self.take()):
            yield from step


class _Loader:
    """What all loaders share.

    Attributes:
        num_samples: of an epoch; None if unknown before its end.
    """

    def __init__(
        self, reader: Reader, requests: Sampler[Request], settings: DataConfig, share: Share
    ) -> None:
        self._reader = reader
        self._answers = _Answers(reader, requests, settings, share)
        self.num_samples = reader.num_samples

    @property
    def num_skipped(self) -> int:
        """Broken samples met so far, in all worker processes of this rank."""
        return self._reader.num_skipped


class TrainLoader(_Loader, ABC):
    """The micro-batches of one replica; ``batch.accumulation`` of them make a step."""

    steps_per_epoch: int | None
    is_stream = False
    is_divided = False  # ranks read streams or shards of their own, which may end at different steps

    @abstractmethod
    def epoch(self, epoch: int, first_sample: int = 0) -> Batches:
        """The micro-batches of an epoch from sample ``first_sample`` on.

        Raises:
            UserError: a sample cannot be read, or too many in a row; also during iteration.
        """

    def not_finite(self, epoch: int, first_sample: int) -> str | None:
        """The first sample of this replica with NaN or Inf, in the step that begins there; in words.

        Its samples are read again. None: there is none, or the data is a stream, which is only read forward.
        """
        return None

    def order_hash(self) -> str | None:
        """A hash of an epoch's order, which must be equal on all ranks; None if it cannot differ.

        Raises:
            UserError: no resumed run would have that order.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint stores of this rank's data, beside the number of samples."""
        return {}

    @abstractmethod
    def resume(self, states: list[dict[str, Any]]) -> None:
        """Continue from what ``state_dict`` returned on all ranks. Called before the first epoch.

        Raises:
            UserError: the checkpoint is of other data.
        """


class _IndexLoader(TrainLoader):
    """Of data read by index, in an order that the harness draws.

    Raises:
        UserError: the dataset is smaller than a global batch.
    """

    def __init__(
        self, dataset: Dataset[Any], settings: DataConfig, batch: BatchSplit, share: Share, order: Order
    ) -> None:
        self._requests = IndexRequests(dataset, batch, share.replica, share.seed, order)
        self._reads = TrainReader(dataset, share, settings.on_bad_sample)
        super().__init__(self._reads, self._requests, settings, share)
        self.steps_per_epoch: int | None = self._requests.num_samples // batch.global_batch_size

    def epoch(self, epoch: int, first_sample: int = 0) -> Batches:
        """Samples before ``first_sample`` are not read."""
        requests = self._requests
        requests.epoch, requests.first_sample = epoch, first_sample
        self._reads.start_epoch(epoch)  # also where workers read: the order may ask the dataset here
        return Batches(iter(self._answers), requests.batch.accumulation, left=len(requests))

    def not_finite(self, epoch: int, first_sample: int) -> str | None:
        requests = copy.copy(self._requests)  # the loader still draws from its own
        requests.epoch, requests.first_sample = epoch, first_sample
        for request in itertools.islice(requests, requests.batch.accumulation):
            for index, draw in zip(request.numbers, request.draws, strict=True):
                for leaf in leaves(self._reader.__getitems__(Request(epoch, 0, [index], draws=[draw]))):
                    if isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.isfinite().all():
                        return sample_name(self._reader.dataset, index)
        return None

    def order_hash(self) -> str | None:
        return self._requests.order_hash()

    def resume(self, states: list[dict[str, Any]]) -> None:
        if any(states):
            raise UserError("the checkpoint is of training on a stream, and this data is read by index")


class _StreamLoader(TrainLoader):
    """Of a stream: the same slices of the same global batches, from data only read forward."""

    is_stream = True

    def __init__(self, dataset: Any, settings: DataConfig, batch: BatchSplit, share: Share) -> None:
        own_of = batch.num_replicas if getattr(dataset, "divides_itself", False) else None
        if own_of and (settings.sharded or batch.chunks is not None):
            setting = "data.sharded is true" if settings.sharded else "train.exact is set"
            raise UserError(
                f"{setting}, but {type(dataset).__name__} divides itself by rank (divides_itself), so its "
                "samples depend on the number of ranks; leave one of the two out"
            )
        self._stream = TrainStreamReader(dataset, share, settings.sharded, own_of)
        self._requests = Requests(batch, share.replica)
        super().__init__(self._stream, self._requests, settings, share)
        total, size = self.num_samples, batch.global_batch_size
        self.steps_per_epoch = None if total is None else total // size
        self.is_divided = bool(own_of) or settings.sharded
        self._batches: Batches | None = None

    def epoch(self, epoch: int, first_sample: int = 0) -> Batches:
        """Samples between the position given to `resume` and ``first_sample`` are read and dropped."""
        requests, begin = self._requests, self._stream.begin
        requests.epoch, requests.first_sample = epoch, first_sample
        knows_position = self._stream.keeps_state and bool(begin.shards) and begin.epoch == epoch
        if first_sample and not knows_position and requests.replica == 0:
            log.warning(
                "%s cannot save its position (state_dict): the first %s samples of the epoch are read and "
                "dropped, by data workers within distributed.timeout_s",
                type(self._stream.dataset).__name__,
                f"{first_sample:,}",
            )
        position = begin if knows_position else StreamPosition(self._stream.num_shards, epoch)
        # Nothing here refers to this object: in a reference cycle, the DataLoader would be left to the
        # garbage collector, and wait 5 s for each of its workers.
        self._batches = Batches(iter(self._answers), requests.batch.accumulation, position=position)
        return self._batches

    def state_dict(self) -> dict[str, Any]:
        assert self._batches is not None, "no epoch has begun"
        return self._batches.position.state_dict()

    def resume(self, states: list[dict[str, Any]]) -> None:
        known = [state for state in states if state]  # a save at a fault has one rank's alone
        if not known:
            return  # saved between two epochs
        position = StreamPosition.merged(known)
        if position.num_shards != self._stream.num_shards:
            raise UserError(
                f"the training stream was read as {position.num_shards} shards when the checkpoint was "
                f"saved, and is now read as {self._stream.num_shards}, which changes the order of its "
                "samples; use the former number (data.sharded, or ranks if it divides itself), or "
                "start a new run from these weights with model.init_from"
            )
        self._stream.begin = position


class EvalLoader(_Loader):
    """Yields (batch, numbers of its samples): each sample once, and as many batches on each replica.

    A replica without samples left yields a filler without numbers: pass it through the model, so that
    collective forward passes stay in step, and discard the result. Of a stream, every rank reads all.

    Attributes:
        batch_size: the largest batch. The k-th batches of all replicas hold consecutive samples.
    """

    def __init__(self, reader: Reader, settings: DataConfig, batch: BatchSplit, share: Share) -> None:
        super().__init__(reader, Requests(batch, share.replica, held_out=True), settings, share)
        self.batch_size = batch.micro_batch_size

    def __iter__(self) -> Iterator[tuple[Any, list[int]]]:
        """Begin again. Raises UserError if there is no sample, or one cannot be read."""
        is_empty = True
        for answer in self._answers:
            is_empty = False
            yield answer.batch, answer.belonging
        if is_empty:
            raise UserError("the evaluation data is empty; set train.eval_every_epochs=0 to train without it")


def train_loader(
    dataset: Any, settings: DataConfig, batch: BatchSplit, share: Share, order: Order = shuffled
) -> TrainLoader:
    """The loader for this kind of data; `order` is for data that is read by index.

    Raises:
        UserError: fewer samples than a global batch, or a setting that this kind of data does not support.
    """
    _check_kind(dataset, settings)
    if not is_stream(dataset):
        if order is not shuffled and hasattr(dataset, "epoch_order"):
            raise UserError(
                f"data.order is set, but {name_of(dataset)} has an order of its own (epoch_order); set it to "
                "null, or derive a class from the dataset whose epoch_order returns these indices in yours"
            )
        return _IndexLoader(dataset, settings, batch, share, order)
    if order is not shuffled:
        raise UserError(
            f"data.order is for data that is read by index, but {type(dataset).__name__} is a stream, which "
            "has an order of its own; set it to null"
        )
    return _StreamLoader(dataset, settings, batch, share)


def eval_loader(dataset: Any, settings: DataConfig, batch: BatchSplit, share: Share) -> EvalLoader:
    """As `train_loader`."""
    _check_kind(dataset, settings)
    if is_stream(dataset):
        if getattr(dataset, "divides_itself", False):
            raise UserError(
                f"{type(dataset).__name__}.divides_itself is true of held-out data, of which each rank reads "
                'all: divide for split="train" alone, and set it to false in the other'
            )
        return EvalLoader(EvalStreamReader(dataset, share), settings, batch, share)
    return EvalLoader(EvalReader(dataset, share, settings.on_bad_sample), settings, batch, share)


def _check_kind(dataset: Any, settings: DataConfig) -> None:
    if settings.sharded and not is_stream(dataset):
        raise UserError(
            f"data.sharded is true, but {type(dataset).__name__} is not a stream: it is read by index, in a "
            "new order each epoch; set it to false"
        )
    if settings.on_bad_sample == "skip" and is_stream(dataset):
        raise UserError(
            f"data.on_bad_sample is skip, but {type(dataset).__name__} is a stream, which has to leave out "
            "by itself what it cannot read; set it to raise"
        )


class _Answers:
    """The answers of `reader` to `requests`, in order; each iteration begins the requests again."""

    def __init__(
        self, reader: Reader, requests: Sampler[Request], settings: DataConfig, share: Share
    ) -> None:
        pins = can_pin(share.device) if settings.pin_memory is None else settings.pin_memory
        in_workers = settings.num_workers > 0
        self._reader, self._requests, self._loader = reader, requests, None
        if in_workers:
            keep_sockets_short()
        elif not pins:
            return  # a DataLoader without workers would add 10 us to each batch
        first = reader.heartbeat.reserve(settings.num_workers)
        self._loader = DataLoader(
            reader,
            batch_sampler=requests,  # type: ignore[arg-type]  # it hands each of them to __getitems__
            collate_fn=lambda answer: answer,
            num_workers=settings.num_workers,
            prefetch_factor=settings.prefetch_factor if in_workers else None,
            persistent_workers=settings.persistent_workers and in_workers,
            pin_memory=pins,
            timeout=share.timeout_s if in_workers else 0,
            # The watch needs children of the main process; Python 3.14's default would make others.
            multiprocessing_context="fork" if in_workers else None,
            worker_init_fn=partial(begin_worker, reader.heartbeat, first),
            # its own: each epoch it draws a number, which must not come from the run's generator
            generator=torch.Generator().manual_seed(reader.seed),
        )

    def __iter__(self) -> Iterator[Any]:
        """Yield the answers before the end; raise the exceptions among them.

        Raises:
            UserError, WorkerError: reading failed.
            RuntimeError: a worker died, or did not answer within the timeout.
        """
        in_process = map(self._reader.__getitems__, self._requests)
        try:
            for answer in in_process if self._loader is None else self._loader:
                if answer is None:
                    return
                if isinstance(answer, UserError | WorkerError):
                    # Not `raise answer`: this frame and its exception would hold each other, and DataLoader,
                    # when left to the garbage collector, waits 5 s for each of its workers.
                    raise type(answer)(*answer.args)
                yield answer
        except (ConnectionError, EOFError) as error:
            raise RuntimeError(
                "a data worker died while it returned a batch: killed for lack of memory, or because "
                "/dev/shm is full (df -h /dev/shm; docker run --shm-size), through which it returns batches"
            ) from error
