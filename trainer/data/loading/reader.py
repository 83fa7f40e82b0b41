"""Readers, which turn requests into batches and read each sample with its own random numbers."""

import logging
import multiprocessing
import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, default_collate, get_worker_info

from trainer.data.loading.worker import result_or_error
from trainer.errors import UserError, is_retryable, on_one_line
from trainer.failures.heartbeat import Heartbeat
from trainer.tensors.bits import as_bytes
from trainer.tensors.generators import generators_kept
from trainer.tensors.nested import leaves, mapped

logger = logging.getLogger(__name__)

# Decoders raise these for broken data; any other exception is a bug and keeps its traceback.
BROKEN_DATA = (OSError, EOFError, ValueError, SyntaxError)
MAX_REPLACEMENTS = 100
Collate = Callable[[list[Any]], Any]
_COLLATE_ADVICE = (
    "all samples must be tensors of the same shape, numbers or text; to pad samples of unequal sizes, set "
    "'data.collate={_target_: trainer.data.padding.Padding}'"
)


@dataclass(frozen=True)
class LoaderOptions:
    """Options that all loaders of a process share; the process reads the samples of `replica`."""

    replica: int
    seed: int
    device: torch.device
    timeout_s: float = 600  # for a batch from data workers
    heartbeat: Heartbeat | None = None
    collate: Collate = default_collate


@dataclass(frozen=True)
class Request:
    """A request for the samples of a micro-batch.

    Attributes:
        first: index of the first sample over all replicas in this request.
        numbers: indices of this replica's samples, in the order of a stream or of validation data; in
            training on data read by index, the indices in the dataset.
        reading: number of the pass over a stream; the reader restarts the stream when this number changes.
        draws: in training on data read by index, a number per sample that determines its random numbers,
            together with the seed and the epoch (see `trainer.data.loading.sampler.draws_of`).
    """

    epoch: int
    first: int
    numbers: Any  # a range or a list
    reading: int = 0
    draws: Sequence[int] = ()


class Answer(NamedTuple):
    """A reader's answer to a request.

    Attributes:
        metadata: for validation data, the indices of the samples; for a training stream, the positions of its
            shards after this batch.
        first: in the first answer of a process, hashes by index, for a comparison across ranks: those of the
            first samples of a stream, or that of sample 0 of data read by index.
    """

    batch: Any
    metadata: Any
    first: dict[int, int] = {}  # noqa: RUF012, never changed

    def pin_memory(self) -> "Answer":
        """Called by torch's DataLoader, which cannot pin tensors in dataclasses."""
        return self._replace(batch=mapped(self.batch, _pinned))


def _pinned(value: Any) -> Any:
    return value.pin_memory() if callable(getattr(value, "pin_memory", None)) else value


class Reader(Dataset[Any], ABC):
    """Turns each request of a loader into a batch, in the main process or in a data worker."""

    num_samples: int | None  # per epoch; None if unknown
    num_skipped = 0  # broken samples so far, in all data workers

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        self.dataset, self.seed, self.collate = dataset, options.seed, options.collate
        self.heartbeat = options.heartbeat or Heartbeat()

    def __getitems__(self, request: Request) -> Any:
        """Return the answer to `request`, or an exception (see `result_or_error`)."""
        try:
            return result_or_error(self._answer, request)
        finally:
            self.heartbeat.rest()

    @abstractmethod
    def _answer(self, request: Request) -> Any:
        """Return an `Answer`, or None if the data ends before this request on all replicas."""


class IndexReader(Reader):
    """Reads batches of a map-style dataset.

    A dataset with ``__getitems__`` returns whole batches and is assumed to be deterministic. If it also has
    ``draw(indices, numbers)``, training batches come from that method. It gets a random uint64 per sample,
    which depends only on the seed, the epoch, the index, and how often the index has occurred in the epoch.
    Any other dataset is read sample by sample; before each ``__getitem__``, the generators of Python, NumPy
    and torch are seeded from the same four values. So augmentation does not depend on the world size, the
    number of workers, or where a run was resumed, and copies of a sample differ.

    The last sample of a batch determines the random numbers in ``data.collate``. In the main process, the
    generators are restored after each read.
    """

    num_samples: int

    def __init__(self, dataset: Dataset[Any], options: LoaderOptions, on_bad_sample: str) -> None:
        super().__init__(dataset, options)
        self.num_samples = len(dataset)  # type: ignore[arg-type]
        self.in_batches = fetches_batches(dataset)
        # Shared with data workers. Created only if needed, because its lock takes a millisecond to create.
        counts = on_bad_sample == "skip" and not self.in_batches
        self._num_skipped = multiprocessing.Value("q") if counts else None

    @property
    def num_skipped(self) -> int:  # type: ignore[override]
        return self._num_skipped.value if self._num_skipped else 0

    def _read(self, epoch: int, index: int, draw: int) -> Any | None:
        """Return the sample, or None if it is broken and `data.on_bad_sample=skip`."""
        self.heartbeat.read(index)
        seed_generators(self.seed, epoch, draw)
        try:
            return sample_of(self.dataset, index)
        except BROKEN_DATA as error:
            reason = f"{sample_name(self.dataset, index)} cannot be read: {error}"
            if self._num_skipped is None:
                if is_retryable(error):
                    raise
                raise UserError(f"{reason}; fix it, or set data.on_bad_sample=skip") from error
            with self._num_skipped.get_lock():
                self._num_skipped.value += 1
            logger.warning("%s; skipped", reason)
            return None

    def _read_or_next(self, epoch: int, index: int, draw: int) -> Any:
        """Return the sample or, if it is broken, the next readable sample, so that every batch is full."""
        for offset in range(MAX_REPLACEMENTS):
            # The index itself may exceed the number of samples per epoch, as in a Mixture.
            sample = self._read(epoch, (index + offset) % self.num_samples if offset else index, draw)
            if sample is not None:
                return sample
        raise UserError(
            f"{MAX_REPLACEMENTS} samples in a row from index {index} cannot be read; set "
            "data.on_bad_sample=raise to see the first error"
        )


class TrainReader(IndexReader):
    """Reads training batches; a broken sample that is skipped is replaced with the next readable one."""

    _epoch: int | None = None

    def __init__(self, dataset: Dataset[Any], options: LoaderOptions, on_bad_sample: str) -> None:
        super().__init__(dataset, options, on_bad_sample)
        self._has_hashed = multiprocessing.RawValue("b")  # shared by the workers of all epochs

    def start_epoch(self, epoch: int) -> None:
        """Set the epoch of the dataset: in this process, and in each data worker before its first batch."""
        if epoch != self._epoch:
            self._epoch = epoch
            set_epoch(self.dataset, epoch)

    def _answer(self, request: Request) -> Answer:
        epoch, indices = request.epoch, request.numbers
        self.start_epoch(epoch)
        if self.in_batches:
            self.heartbeat.read(indices[0])
            if hasattr(self.dataset, "draw"):
                fetched = self.dataset.draw(indices, random_numbers(self.seed, epoch, request.draws))
            else:
                fetched = self.dataset.__getitems__(indices)
            batch = collated_batch(fetched, self.dataset, indices, self.collate)
        else:
            with generators_kept(of_accelerators=False):
                samples = [
                    self._read_or_next(epoch, index, draw)
                    for index, draw in zip(indices, request.draws, strict=True)
                ]
                batch = collated(samples, self.dataset, indices, self.collate)
        return Answer(batch, {}, self._sample_0(epoch))

    def _sample_0(self, epoch: int) -> dict[int, int]:
        """Return {0: hash of sample 0} in the first answer of the first worker, if the sample can be read.

        Log a warning if the sample differs when it is read again with the same random numbers.
        """
        if self._has_hashed.value or getattr(get_worker_info(), "id", False):
            return {}
        self._has_hashed.value = 1
        self.heartbeat.read(0)
        try:
            with generators_kept(of_accelerators=False):
                first, again = self._hash_sample_0(epoch), self._hash_sample_0(epoch)
        except BROKEN_DATA:
            return {}
        if first != again:
            logger.warning(
                "sample 0 of %s differs when it is read twice with the same random numbers, so samples "
                "depend on the number of ranks and workers, and differ after a resume; use the global "
                "generators of torch, NumPy or Python, which are seeded for each sample, or seed your own "
                "generator from the index",
                name_of(self.dataset),
            )
        return {0: first}

    def _hash_sample_0(self, epoch: int) -> int:
        seed_generators(self.seed, epoch, 0)
        return checksum(self.dataset.__getitems__([0]) if self.in_batches else self.dataset[0])


class EvalReader(IndexReader):
    """Returns each batch with the indices of its readable samples; without any, a filler sample."""

    def _answer(self, request: Request) -> Answer | None:
        if request.first >= self.num_samples:
            return None
        requested = [index for index in request.numbers if index < self.num_samples]
        indices = requested or [0]
        if self.in_batches:
            self.heartbeat.read(indices[0])
            fetched = self.dataset.__getitems__(indices)
            return Answer(collated_batch(fetched, self.dataset, indices, self.collate), requested)
        with generators_kept(of_accelerators=False):
            read = {index: self._read(0, index, index) for index in requested}
            valid = {index: sample for index, sample in read.items() if sample is not None}
            samples = list(valid.values()) or [self._read_or_next(0, 0, 0)]
            batch = collated(samples, self.dataset, indices, self.collate)
            return Answer(batch, list(valid))


def collated_batch(fetched: Any, dataset: Any, indices: Sequence[int], collate: Collate) -> Any:
    """Return a batch from the result of `__getitems__`, which is a list of samples or a batch."""
    if isinstance(fetched, list):
        if len(fetched) != len(indices):
            raise UserError(
                f"{name_of(dataset)}.__getitems__ returned a list of {len(fetched)} for {len(indices)} "
                "indices; return a list with one sample per index, or a batch as a tuple, dict or tensor"
            )
        return collated(fetched, dataset, indices, collate)
    if collate is not default_collate:
        raise UserError(
            f"data.collate is not supported with {name_of(dataset)}, because its __getitems__ returns whole "
            "batches; return a list of samples from it, or set data.collate=null"
        )
    return fetched


def collated(samples: list[Any], dataset: Any, indices: Sequence[int], collate: Collate) -> Any:
    """Return the batch of `samples`, or raise UserError with the first sample that does not fit."""
    try:
        batch = collate(samples)
    except Exception as error:
        advice = "this was raised by data.collate" if collate is not default_collate else _COLLATE_ADVICE
        for index, sample in zip(indices, samples, strict=False):
            try:
                collate([samples[0], sample])
            except Exception as pair_error:
                other = "" if index == indices[0] else f" with {sample_name(dataset, indices[0])}"
                raise UserError(
                    f"{sample_name(dataset, index)} cannot be in a batch{other}: "
                    f"{on_one_line(pair_error)}; {advice}"
                ) from error
        raise
    if batch is None:
        raise UserError("data.collate returned None, but must return the batch")
    return batch


def sample_name(dataset: Any, index: int) -> str:
    """Return the name of a sample for messages; in a mixture, its name in its own dataset."""
    if hasattr(dataset, "origin_of_sample"):
        return sample_name(*dataset.origin_of_sample(index))
    return f"sample {index} of {name_of(dataset)}"


def name_of(dataset: Any) -> str:
    """Return the name of the dataset's class, ignoring wrappers that settings added."""
    return getattr(dataset, "class_name", type(dataset).__name__)


def fetches_batches(dataset: Dataset[Any]) -> bool:
    """Return whether the dataset, or the dataset that a Subset wraps, fetches several indices at once."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))  # a subclass may set it to None


def set_epoch(dataset: Any, epoch: int) -> None:
    """Call `set_epoch` of the dataset, or of the datasets in a Subset, ConcatDataset or Mixture."""
    if callable(own := getattr(dataset, "set_epoch", None)):
        own(epoch)
    elif isinstance(dataset, Subset):
        set_epoch(dataset.dataset, epoch)
    elif isinstance(parts := getattr(dataset, "datasets", None), list | tuple):
        for part in parts:
            set_epoch(part, epoch)


def checksum(sample: Any) -> int:
    """Return a checksum of the numbers, text, tensors, images and arrays in a sample; ignore other types."""
    total = 0
    for leaf in leaves(sample):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested:
            numbers = leaf.detach().cpu().resolve_conj().resolve_neg()
            total = zlib.crc32(as_bytes(numbers), total)
        elif hasattr(leaf, "tobytes") and not (isinstance(leaf, np.ndarray) and leaf.dtype.hasobject):
            total = zlib.crc32(leaf.tobytes(), total)
        elif isinstance(leaf, bool | int | float | str | bytes):
            total = zlib.crc32(repr(leaf).encode(), total)
    return total


def sample_of(dataset: Any, index: int) -> Any:
    """Return the sample. If the dataset returns None, raise ValueError, which counts as a broken sample."""
    if (sample := dataset[index]) is None:
        raise ValueError("the dataset returned None")
    return sample


def random_numbers(seed: int, epoch: int, indices: Sequence[int]) -> np.ndarray:
    """Return a uint64 for each index, determined by the arguments.

    Source: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", 2014 (SplitMix64).
    """
    start = np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)
    mixed = start + np.asarray(indices, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def seed_generators(seed: int, epoch: int, index: int) -> None:
    """Seed the CPU generators of Python, NumPy and torch from the arguments."""
    seeds = np.random.SeedSequence((seed, epoch, index)).generate_state(4).tolist()
    random.seed(seeds[0])
    np.random.seed(seeds[1:3])
    torch.default_generator.manual_seed(seeds[3])  # torch.manual_seed would reseed the GPUs too
