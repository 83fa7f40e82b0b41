"""Loaders of training and validation data, whose reader runs in data workers or in this process.

`train_loader` and `eval_loader` create a loader for data read by index or for a stream, with one interface. A
loader lives for the whole run.
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
    LoaderOptions,
    Reader,
    Request,
    TrainReader,
    name_of,
    sample_name,
)
from trainer.data.loading.sampler import IndexRequests, Requests
from trainer.data.loading.stream_reader import EvalStreamReader, StreamPosition, TrainStreamReader
from trainer.data.loading.worker import WorkerError, init_worker, shorten_socket_paths
from trainer.data.order import Order, shuffled
from trainer.data.stream import is_stream
from trainer.errors import UserError
from trainer.tensors.nested import leaves

log = logging.getLogger(__name__)


class Batches:
    """The remaining micro-batches of an epoch, taken one step at a time.

    Args:
        accumulation: number of this rank's micro-batches per step.
        left: number of micro-batches that remain; None if unknown, as for streams.
    """

    def __init__(
        self,
        answers: Iterator[Answer],
        accumulation: int,
        left: int | None = None,
        position: StreamPosition = StreamPosition(),  # noqa: B008, it is frozen
    ) -> None:
        self._answers, self.accumulation, self._left, self.position = answers, accumulation, left, position
        self._next: list[Answer] = []

    @property
    def data_left(self) -> bool:
        """Whether this rank has data for another step; true for a rank that reads no data."""
        available = len(self.ahead()) if self._left is None else self._left
        return available >= self.accumulation

    def ahead(self) -> list[Any]:
        """Read and return the micro-batches of the next step, without taking them."""
        if not self._next:
            self._next = list(itertools.islice(self._answers, self.accumulation))
        return [answer.batch for answer in self._next]

    def first_read(self) -> Mapping[int, int]:
        """Return hashes of the first samples by index, for a comparison across ranks."""
        return {number: value for answer in self._next for number, value in answer.first.items()}

    def take(self) -> list[Any]:
        """Take the micro-batches of the next step; an empty list for a rank that reads no data."""
        batches = self.ahead()
        read, self._next = self._next, []
        for answer in read:
            if answer.metadata:
                self.position = self.position.advanced(answer.metadata)
        if self._left is not None:
            self._left -= len(read)
        else:
            self.ahead()  # now, while the heartbeat reports that this rank waits for data
        return batches

    def __iter__(self) -> Iterator[Any]:
        while self.data_left and (step := self.take()):
            yield from step


class _Loader:
    def __init__(
        self, reader: Reader, requests: Sampler[Request], settings: DataConfig, options: LoaderOptions
    ) -> None:
        self._reader = reader
        self._answers = _Answers(reader, requests, settings, options)
        self.num_samples = reader.num_samples

    @property
    def num_skipped(self) -> int:
        """The number of broken samples so far, in all data workers of this rank."""
        return self._reader.num_skipped

    @property
    def dataset(self) -> Any:
        return self._reader.dataset


class TrainLoader(_Loader, ABC):
    """A loader of the micro-batches of one replica."""

    steps_per_epoch: int | None
    _requests: Requests
    is_stream = False
    is_divided = False  # whether each rank reads its own stream or shards, which may end at different steps

    @abstractmethod
    def epoch(self, epoch: int, first_sample: int = 0) -> Batches:
        """Return the micro-batches of an epoch from sample `first_sample` on."""

    def requests(self, epoch: int, first_sample: int) -> list[Request]:
        """Return this replica's requests for the step from `first_sample` on, without reading samples."""
        requests = copy.copy(self._requests)  # the loader may still iterate over the original
        requests.epoch, requests.first_sample = epoch, first_sample
        return list(itertools.islice(requests, requests.batch.accumulation))

    def not_finite(self, epoch: int, first_sample: int) -> str | None:
        """Return the name of this replica's first sample with NaN or Inf in the step from `first_sample` on.

        The samples of the step are read again. Return None if there is none, or for a stream.
        """
        return None

    def order_hash(self) -> str | None:
        """Return a hash of an epoch's order, which must be equal on all ranks; None if it cannot differ."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's data that a checkpoint needs besides the number of samples."""
        return {}

    @abstractmethod
    def resume(self, states: list[dict[str, Any]]) -> None:
        """Restore the states that `state_dict` returned on all ranks. Call it before the first epoch."""


class _IndexLoader(TrainLoader):
    def __init__(
        self,
        dataset: Dataset[Any],
        settings: DataConfig,
        batch: BatchSplit,
        options: LoaderOptions,
        order: Order,
    ) -> None:
        self._requests: IndexRequests = IndexRequests(dataset, batch, options.replica, options.seed, order)
        self._train_reader = TrainReader(dataset, options, settings.on_bad_sample)
        super().__init__(self._train_reader, self._requests, settings, options)
        self.steps_per_epoch: int | None = self._requests.num_samples // batch.global_batch_size

    def epoch(self, epoch: int, first_sample: int = 0) -> Batches:
        requests = self._requests
        requests.epoch, requests.first_sample = epoch, first_sample
        self._train_reader.start_epoch(epoch)  # in this process, too: the order may use the dataset
        return Batches(iter(self._answers), requests.batch.accumulation, left=len(requests))

    def not_finite(self, epoch: int, first_sample: int) -> str | None:
        for request in self.requests(epoch, first_sample):
            for index, draw in zip(request.numbers, request.draws, strict=True):
                for leaf in leaves(self._reader.__getitems__(Request(epoch, 0, [index], draws=[draw]))):
                    if isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.isfinite().all():
                        return sample_name(self._reader.dataset, index)
        return None

    def order_hash(self) -> str | None:
        return self._requests.order_hash()

    def resume(self, states: list[dict[str, Any]]) -> None:
        if any(states):
            raise UserError(
                "the checkpoint is from training on a stream, but this run's data is read by index; train "
                "on the same data, or start a new run from these weights with model.init_from"
            )


class _StreamLoader(TrainLoader):
    is_stream = True

    def __init__(self, dataset: Any, settings: DataConfig, batch: BatchSplit, options: LoaderOptions) -> None:
        num_streams = batch.num_replicas if getattr(dataset, "divides_itself", False) else None
        if num_streams and (settings.sharded or batch.chunks is not None):
            setting, default = ("data.sharded", "false") if settings.sharded else ("train.exact", "null")
            raise UserError(
                f"{setting} is not supported with {type(dataset).__name__}, because it divides itself "
                "among ranks (divides_itself=True), so its samples depend on the number of ranks; set "
                f"{setting}={default}, or remove divides_itself and yield the same samples on every rank"
            )
        self._stream = TrainStreamReader(dataset, options, settings.sharded, num_streams)
        self._requests = Requests(batch, options.replica)
        super().__init__(self._stream, self._requests, settings, options)
        total, size = self.num_samples, batch.global_batch_size
        self.steps_per_epoch = None if total is None else total // size
        self.is_divided = bool(num_streams) or settings.sharded
        self._batches: Batches | None = None

    def epoch(self, epoch: int, first_sample: int = 0) -> Batches:
        requests, start = self._requests, self._stream.start
        requests.epoch, requests.first_sample = epoch, first_sample
        knows_position = self._stream.keeps_state and bool(start.shards) and start.epoch == epoch
        if first_sample and not knows_position and requests.replica == 0:
            log.warning(
                "%s has no state_dict to save its position: the first %s samples of the epoch are read and "
                "dropped; with data workers, this must finish within distributed.timeout_s",
                type(self._stream.dataset).__name__,
                f"{first_sample:,}",
            )
        position = start if knows_position else StreamPosition(self._stream.num_shards, epoch)
        # `Batches` must not refer to this object: in a reference cycle, the garbage collector would delete
        # the DataLoader, which then waits 5 s for each of its workers.
        self._batches = Batches(iter(self._answers), requests.batch.accumulation, position=position)
        return self._batches

    def state_dict(self) -> dict[str, Any]:
        assert self._batches is not None, "no epoch has started"
        return self._batches.position.state_dict()

    def resume(self, states: list[dict[str, Any]]) -> None:
        known = [state for state in states if state]  # a save on failure has the state of one rank only
        if not known:
            return  # saved between two epochs
        position = StreamPosition.merged(known)
        if position.num_shards != self._stream.num_shards:
            raise UserError(
                f"the training stream was read as {position.num_shards} shards when the checkpoint was "
                f"saved, but is now read as {self._stream.num_shards}, which changes the order of its "
                "samples; restore the previous number (data.sharded, or the number of ranks if the stream "
                "divides itself), or start a new run from these weights with model.init_from"
            )
        self._stream.start = position


class EvalLoader(_Loader):
    """Yields (batch, indices of its samples): each sample once, and the same number of batches per replica.

    A replica that has no samples left yields a filler batch without indices. Pass it through the model,
    because forward passes may be collective, and discard the result. Every rank reads the whole stream.
    The k-th batches of all replicas contain consecutive samples.
    """

    def __init__(
        self, reader: Reader, settings: DataConfig, batch: BatchSplit, options: LoaderOptions
    ) -> None:
        super().__init__(reader, Requests(batch, options.replica, held_out=True), settings, options)
        self.batch_size = batch.micro_batch_size

    def __iter__(self) -> Iterator[tuple[Any, list[int]]]:
        is_empty = True
        for answer in self._answers:
            is_empty = False
            yield answer.batch, answer.metadata
        if is_empty:
            raise UserError(
                "the validation data is empty; set train.eval_every_epochs=0 to train without evaluation"
            )


def train_loader(
    dataset: Any, settings: DataConfig, batch: BatchSplit, options: LoaderOptions, order: Order = shuffled
) -> TrainLoader:
    """Return the training loader for a stream or for data read by index, to which `order` applies."""
    _check_kind(dataset, settings)
    if not is_stream(dataset):
        if order is not shuffled and hasattr(dataset, "epoch_order"):
            raise UserError(
                f"data.order is not supported with {name_of(dataset)}, because the dataset determines its "
                "own order (epoch_order); set data.order=null, or override epoch_order in a subclass of the "
                "dataset"
            )
        return _IndexLoader(dataset, settings, batch, options, order)
    if order is not shuffled:
        raise UserError(
            f"data.order is not supported with {type(dataset).__name__}, because a stream determines its own "
            "order; set data.order=null"
        )
    return _StreamLoader(dataset, settings, batch, options)


def eval_loader(dataset: Any, settings: DataConfig, batch: BatchSplit, options: LoaderOptions) -> EvalLoader:
    """Return the loader of validation data."""
    _check_kind(dataset, settings)
    if is_stream(dataset):
        if getattr(dataset, "divides_itself", False):
            raise UserError(
                f"{type(dataset).__name__}.divides_itself is not supported for validation data, because each "
                "rank must read all of it; divide the stream only for split='train', and set "
                "divides_itself=False for split='eval'"
            )
        return EvalLoader(EvalStreamReader(dataset, options), settings, batch, options)
    return EvalLoader(EvalReader(dataset, options, settings.on_bad_sample), settings, batch, options)


def _check_kind(dataset: Any, settings: DataConfig) -> None:
    if settings.sharded and not is_stream(dataset):
        raise UserError(
            f"data.sharded=true is for streams, but {type(dataset).__name__} is read by index; set "
            "data.sharded=false"
        )
    if settings.on_bad_sample == "skip" and is_stream(dataset):
        raise UserError(
            f"data.on_bad_sample=skip is not supported with {type(dataset).__name__}, because a stream must "
            "skip broken samples itself; set data.on_bad_sample=raise"
        )


class _Answers:
    def __init__(
        self, reader: Reader, requests: Sampler[Request], settings: DataConfig, options: LoaderOptions
    ) -> None:
        pins = can_pin(options.device) if settings.pin_memory is None else settings.pin_memory
        in_workers = settings.num_workers > 0
        self._reader, self._requests, self._loader = reader, requests, None
        if in_workers:
            shorten_socket_paths()
        elif not pins:
            return  # a DataLoader without workers would add 10 us to each batch
        first = reader.heartbeat.reserve(settings.num_workers)
        self._loader = DataLoader(
            reader,
            batch_sampler=requests,  # type: ignore[arg-type]  # it passes each request to __getitems__
            collate_fn=lambda answer: answer,
            num_workers=settings.num_workers,
            prefetch_factor=settings.prefetch_factor if in_workers else None,
            persistent_workers=settings.persistent_workers and in_workers,
            pin_memory=pins,
            timeout=options.timeout_s if in_workers else 0,
            # Failure detection needs workers that are children of this process; forkserver's are not.
            multiprocessing_context="fork" if in_workers else None,
            worker_init_fn=partial(init_worker, reader.heartbeat, first),
            # DataLoader draws a number each epoch, which must not come from the run's generator.
            generator=torch.Generator().manual_seed(reader.seed),
        )

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches (`Answer`) until the end of the data; raise exceptions returned instead."""
        in_process = map(self._reader.__getitems__, self._requests)
        try:
            for answer in in_process if self._loader is None else self._loader:
                if answer is None:
                    return
                if isinstance(answer, UserError | WorkerError):
                    # `raise answer` would create a reference cycle of this frame and its exception: if the
                    # garbage collector deletes a DataLoader, that waits 5 s for each of its workers.
                    raise type(answer)(*answer.args)
                yield answer
        except (ConnectionError, EOFError) as error:
            raise RuntimeError(
                "a data worker died while it returned a batch: either it ran out of memory, or /dev/shm, "
                "which is used to return batches, is full (df -h /dev/shm; docker run --shm-size)"
            ) from error
