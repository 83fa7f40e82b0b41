"""The contract of data loaders; samplers and readers joined, by torch's DataLoader where there are workers.

A loader lives for the whole run; loaders.py chooses between data read by index and streams.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Sampler, default_collate

from trainer.data.loading.collation import Collate
from trainer.data.loading.worker import WorkerError, begin_worker, keep_sockets_short
from trainer.errors import UserError
from trainer.faults.heartbeat import Heartbeat


class LoaderSettings(Protocol):
    """How samples are read; the sampler chooses which."""

    num_workers: int
    """Processes that read ahead; 0 reads in the main process."""
    prefetch_factor: int
    """Batches that each worker reads ahead."""
    pin_memory: bool | None
    """Page-locked batches, for asynchronous copies to the GPU; None: if there is a GPU."""
    persistent_workers: bool
    """Keep the workers from epoch to epoch."""
    on_bad_sample: str
    """raise | skip"""
    sharded: bool
    """Read the shards of a stream separately, each on one replica if possible."""


@dataclass(frozen=True)
class Share:
    """The share of each batch that a process reads, and how.

    Attributes:
        timeout_s: how long to wait for a batch from the workers.
        collate: makes a batch of a list of samples.
    """

    replica: int
    seed: int
    device: torch.device
    timeout_s: float = 600
    heartbeat: Heartbeat | None = None
    collate: Collate = default_collate


class Batches(Iterator[Any]):
    """The rest of an epoch: micro-batches that make up whole steps.

    Attributes:
        data_left: whether this rank has data for another step.
    """

    data_left: bool

    @abstractmethod
    def ahead(self) -> list[Any]:
        """The micro-batches of the next step, read now. Called between steps."""


class TrainLoader(Protocol):
    """The micro-batches of one replica; ``batch.accumulation`` of them make a step."""

    num_samples: int | None
    """Samples of an epoch; None if unknown before its end."""
    steps_per_epoch: int | None

    @property
    def num_skipped(self) -> int:
        """Broken samples met so far, in all worker processes of this rank."""

    def epoch(self, epoch: int, first_sample: int = 0) -> Batches:
        """The micro-batches of an epoch from sample ``first_sample`` on.

        Raises:
            UserError: a sample cannot be read, or too many in a row; also during iteration.
        """

    def not_finite(self, epoch: int, first_sample: int) -> str | None:
        """The first sample of this replica with NaN or Inf, in the step that begins there; in words.

        Its samples are read again. None: there is none, or the data is a stream, which is only read forward.
        """

    def order_hash(self) -> str | None:
        """A hash of an epoch's order, which must be equal on all ranks; None if it cannot differ.

        Raises:
            UserError: no resumed run would have that order.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint stores of this rank's data, besides the number of samples."""

    def resume(self, states: list[dict[str, Any]]) -> None:
        """Continue from what ``state_dict`` returned on all ranks. Called before the first epoch.

        Raises:
            UserError: the checkpoint is of other data.
        """


class EvalLoader(Protocol):
    """Yields (batch, numbers of its samples): each sample once, and as many batches on each replica.

    A replica without samples left yields a filler without numbers: pass it through the model, so that
    collective forward passes stay in step, and discard the result.
    """

    num_samples: int | None
    batch_size: int
    """The largest batch. The k-th batches of all replicas hold consecutive samples."""

    @property
    def num_skipped(self) -> int: ...

    def __iter__(self) -> Iterator[tuple[Any, list[int]]]:
        """Raises UserError if a sample cannot be read."""


class Reader(Protocol):
    """Answers a sampler's requests, in this process or in workers."""

    seed: int
    heartbeat: Heartbeat

    def __getitems__(self, key: Any) -> Any: ...


def batches_of(
    reader: Reader, sampler: Sampler[Any], settings: LoaderSettings, share: Share
) -> Iterable[Any]:
    """What `reader` makes of each request of `sampler`, in order; each iteration begins the sampler again."""
    pins = share.device.type == "cuda" if settings.pin_memory is None else settings.pin_memory
    if settings.num_workers == 0 and not pins:
        return _InThisProcess(reader, sampler)
    return _data_loader(reader, sampler, settings, share, pins)


class _InThisProcess:
    """In place of a DataLoader without workers, which adds 10 us to each batch."""

    def __init__(self, reader: Reader, sampler: Sampler[Any]) -> None:
        self._reader, self._sampler = reader, sampler

    def __iter__(self) -> Iterator[Any]:
        return map(self._reader.__getitems__, self._sampler)


def _data_loader(
    reader: Reader, sampler: Sampler[Any], settings: LoaderSettings, share: Share, pins: bool
) -> DataLoader[Any]:
    in_workers = settings.num_workers > 0
    if in_workers:
        keep_sockets_short()
    first = reader.heartbeat.reserve(settings.num_workers)
    return DataLoader(
        reader,  # type: ignore[arg-type]  # it only calls __getitems__
        batch_sampler=sampler,
        collate_fn=_as_it_is,
        num_workers=settings.num_workers,
        prefetch_factor=settings.prefetch_factor if in_workers else None,
        persistent_workers=settings.persistent_workers and in_workers,
        pin_memory=pins,
        timeout=share.timeout_s if in_workers else 0,
        # The watch needs children of the main process; Python 3.14's default, the fork server, makes others.
        multiprocessing_context="fork" if in_workers else None,
        worker_init_fn=partial(begin_worker, reader.heartbeat, first),
        # its own: each epoch it draws a number, which must not come from the run's generator
        generator=torch.Generator().manual_seed(reader.seed),
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def raise_errors(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches; raise the exceptions that reading returned.

    Raises:
        UserError, WorkerError: reading failed.
        RuntimeError: a worker died, or did not answer within the timeout.
    """
    try:
        for batch in batches:
            if isinstance(batch, UserError | WorkerError):
                # Not `raise batch`: this frame and its exception would hold each other, and DataLoader, when
                # left to the garbage collector, waits 5 s for each of its workers.
                raise type(batch)(*batch.args)
            yield batch
    except (ConnectionError, EOFError) as error:
        raise RuntimeError(
            "a data worker died while it returned a batch; perhaps it was killed for lack of memory"
        ) from error
