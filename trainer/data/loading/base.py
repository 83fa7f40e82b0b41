"""What every loader of data is: the contract, and torch's DataLoader round a sampler and a reader of ours.

One life long for the whole run. trainer/data/loading/loaders.py chooses between data read by index and
streams.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Sampler

from trainer.data.loading.worker import WorkerError, begin_worker, keep_sockets_short
from trainer.errors import UserError
from trainer.faults.heartbeat import Heartbeat


class LoaderSettings(Protocol):
    """How samples are read; which ones is the sampler's business."""

    num_workers: int
    """Processes that read ahead; 0 reads in the main process."""
    prefetch_factor: int
    """Batches that each worker keeps ready."""
    pin_memory: bool | None
    """Page-locked batches, for asynchronous copies to the GPU; None: where there is one."""
    persistent_workers: bool
    """Keep the workers from epoch to epoch."""
    on_bad_sample: str
    """raise | skip"""
    sharded: bool
    """Read the shards of a stream side by side, each on one replica where that can be."""


@dataclass(frozen=True)
class Share:
    """Which part of each batch a process reads, and for whom.

    Attributes:
        timeout_s: how long to wait for a batch from the workers.
    """

    replica: int
    seed: int
    device: torch.device
    timeout_s: float = 600
    heartbeat: Heartbeat | None = None


Parts = Callable[[], Iterator[tuple[int, int]]]
"""Hands out what a process reads next, as (step from now on, replica), where no replica is its own."""


class Batches(Iterator[Any]):
    """What is left of an epoch: micro-batches, of which the last step is whole.

    Attributes:
        more: whether another step follows those handed out, as far as this rank's data goes.
    """

    more: bool

    def ahead(self) -> list[Any]:
        """The micro-batches of the next step, which are read now; to be called between steps."""
        raise NotImplementedError


class TrainLoader(Protocol):
    """The micro-batches of one replica; ``batch.accumulation`` of them make a step."""

    num_samples: int | None
    """Of an epoch; None where that is not known before its end."""
    steps_per_epoch: int | None

    @property
    def num_skipped(self) -> int:
        """Broken samples met so far, in all worker processes of this rank."""

    def epoch(self, epoch: int, first_sample: int = 0, parts: Parts | None = None) -> Batches:
        """The micro-batches of an epoch from its sample ``first_sample`` on, or of those ``parts`` of it.

        Raises:
            UserError: a sample cannot be read, or too many in a row; also while they are taken. ``parts``
                of a stream, which is only read forward.
        """

    def place(self) -> dict[str, Any]:
        """What a checkpoint has to hold of this rank's data, besides the number of samples."""

    def resume(self, places: list[dict[str, Any]]) -> None:
        """Go on from what ``place`` gave on all ranks, to be called before the first epoch.

        Raises:
            UserError: the data was another.
        """


class EvalLoader(Protocol):
    """Yields (batch, numbers of its samples): each sample once, equally many batches on each replica.

    A replica that has run out yields a filler without numbers: pass it through the model, so that collective
    forward passes stay in step, and discard the result.
    """

    num_samples: int | None
    batch_size: int
    """The most that a batch holds. The k-th batches of all replicas are samples that follow one another."""

    @property
    def num_skipped(self) -> int: ...

    def __iter__(self) -> Iterator[tuple[Any, list[int]]]:
        """Raises UserError where a sample cannot be read."""


class Reader(Protocol):
    """What answers a sampler's requests, in this process or in workers."""

    seed: int
    heartbeat: Heartbeat

    def __getitems__(self, key: Any) -> Any: ...


def data_loader(
    reader: Reader, sampler: Sampler[Any], settings: LoaderSettings, share: Share
) -> DataLoader[Any]:
    in_workers = settings.num_workers > 0
    if in_workers:
        keep_sockets_short()
    first = reader.heartbeat.reserve(settings.num_workers)
    return DataLoader(
        reader,  # type: ignore[arg-type]  # __getitems__ is all that it asks for
        batch_sampler=sampler,
        collate_fn=_as_it_is,
        num_workers=settings.num_workers,
        prefetch_factor=settings.prefetch_factor if in_workers else None,
        persistent_workers=settings.persistent_workers and in_workers,
        pin_memory=share.device.type == "cuda" if settings.pin_memory is None else settings.pin_memory,
        timeout=share.timeout_s if in_workers else 0,
        # Children of the main process, as those of Python 3.14's default, the fork server, are not.
        multiprocessing_context="fork" if in_workers else None,
        worker_init_fn=partial(begin_worker, reader.heartbeat, first),
        # one of its own: each epoch it draws a number, which must not come from the run's generator
        generator=torch.Generator().manual_seed(reader.seed),
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def raise_errors(batches: DataLoader[Any]) -> Iterator[Any]:
    """What the workers read.

    Raises:
        UserError, WorkerError: what reading raised.
        RuntimeError: a worker died, or kept us waiting too long.
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
            "a data worker died while it handed over a batch: killed, perhaps for want of memory"
        ) from error
