"""Loaders: torch's DataLoader round our samplers and readers, one life long for the whole run."""

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from trainer.data.batch import BatchSplit
from trainer.data.reader import BatchReader, EvalReader, TrainReader
from trainer.data.sampler import EvalSampler, TrainSampler
from trainer.errors import UserError
from trainer.faults.heartbeat import Heartbeat

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


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


class TrainLoader:
    """The micro-batches of one replica; ``batch.accumulation`` of them make a step.

    ``timeout_s`` is how long to wait for a batch from the workers.

    Raises:
        UserError: the dataset is smaller than a global batch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        settings: LoaderSettings,
        batch: BatchSplit,
        *,
        replica: int,
        seed: int,
        device: torch.device,
        timeout_s: float = 600,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._sampler = TrainSampler(
            dataset,  # type: ignore[arg-type]
            batch,
            replica=replica,
            seed=seed,
        )
        self._reader = TrainReader(dataset, seed, settings.on_bad_sample, heartbeat)
        self._loader = _data_loader(self._reader, self._sampler, settings, device, timeout_s)

    @property
    def steps_per_epoch(self) -> int:
        return self._sampler.steps_per_epoch

    @property
    def num_samples(self) -> int:
        return self._reader.num_samples

    @property
    def num_skipped(self) -> int:
        """Broken samples met so far, in all worker processes of this rank."""
        return self._reader.num_skipped

    def epoch(self, epoch: int, first_sample: int = 0) -> Iterator[Any]:
        """The micro-batches of an epoch from its sample ``first_sample`` on; what lies before it is not read.

        Raises:
            UserError: a sample cannot be read, or too many in a row.
        """
        self._sampler.epoch, self._sampler.first_sample = epoch, first_sample
        yield from _raise_errors(self._loader)


class EvalLoader:
    """Yields (batch, is_real): every sample once over all replicas, equally many batches on each.

    A replica that has run out yields a filler with ``is_real`` False: pass it through the model, so that
    collective forward passes stay in step, and discard the result.

    Raises:
        UserError: the dataset is empty; while iterating: a sample cannot be read.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        settings: LoaderSettings,
        batch: BatchSplit,
        *,
        replica: int,
        seed: int,
        device: torch.device,
        timeout_s: float = 600,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        if len(dataset) == 0:  # type: ignore[arg-type]
            raise UserError("the evaluation data is empty; train.eval_every_epochs=0 trains without")
        sampler = EvalSampler(
            dataset,  # type: ignore[arg-type]
            batch,
            replica=replica,
        )
        self._reader = EvalReader(dataset, seed, settings.on_bad_sample, heartbeat)
        self._loader = _data_loader(self._reader, sampler, settings, device, timeout_s)

    @property
    def num_samples(self) -> int:
        return self._reader.num_samples

    @property
    def num_skipped(self) -> int:
        return self._reader.num_skipped

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        return _raise_errors(self._loader)


def _data_loader(
    reader: BatchReader,
    sampler: Sampler[Any],
    settings: LoaderSettings,
    device: torch.device,
    timeout_s: float,
) -> DataLoader[Any]:
    in_workers = settings.num_workers > 0
    first = reader.heartbeat.reserve(settings.num_workers)
    return DataLoader(
        reader,
        batch_sampler=sampler,
        collate_fn=_as_it_is,
        num_workers=settings.num_workers,
        prefetch_factor=settings.prefetch_factor if in_workers else None,
        persistent_workers=settings.persistent_workers and in_workers,
        pin_memory=device.type == "cuda" if settings.pin_memory is None else settings.pin_memory,
        timeout=timeout_s if in_workers else 0,
        # Children of the main process, as those of Python 3.14's default, the fork server, are not.
        multiprocessing_context="fork" if in_workers else None,
        worker_init_fn=partial(_begin_worker, reader.heartbeat, first),
        # one of its own: each epoch it draws a number, which must not come from the run's generator
        generator=torch.Generator().manual_seed(reader.seed),
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def _raise_errors(batches: DataLoader[Any]) -> Iterator[Any]:
    """What the workers read.

    Raises:
        UserError: one that a worker met.
        RuntimeError: a worker died, or kept us waiting too long.
    """
    try:
        for batch in batches:
            if isinstance(batch, UserError):
                # Not `raise batch`: this frame and its exception would hold each other, and DataLoader, when
                # left to the garbage collector, waits 5 s for each of its workers.
                raise UserError(str(batch))
            yield batch
    except (ConnectionError, EOFError) as error:
        raise RuntimeError(
            "a data worker died while it handed over a batch: killed, perhaps for want of memory"
        ) from error


def _begin_worker(heartbeat: Heartbeat, first: int, worker_id: int) -> None:
    heartbeat.become_worker(first + worker_id)
    _obey_the_main_process_alone()


def _obey_the_main_process_alone() -> None:
    """Let a worker outlive the signals that stop a whole session, but not its main process.

    The main process may still want batches on its way to a checkpoint. A SIGTERM from it, which is how
    DataLoader ends a worker that does not answer, counts; should it be killed, the kernel kills the worker,
    also one that is stuck. (Workers are forked from the main thread: the kernel watches that thread.)
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_the_main_process_says_so, daemon=True).start()


def _end_when_the_main_process_says_so() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
