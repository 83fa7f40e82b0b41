"""From requests to batches: each sample is read under its own random numbers; broken samples are handled."""

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

from trainer.data.loading.worker import answer
from trainer.errors import UserError, is_retryable, on_one_line
from trainer.failures.heartbeat import Heartbeat
from trainer.tensors.bits import as_bytes
from trainer.tensors.generators import generators_kept
from trainer.tensors.nested import leaves, mapped

logger = logging.getLogger(__name__)

# What decoders raise over broken data; anything else is a bug and keeps its traceback.
BROKEN_DATA = (OSError, EOFError, ValueError, SyntaxError)
MAX_REPLACEMENTS = 100
Collate = Callable[[list[Any]], Any]
_UNEQUAL = (
    "have all samples be tensors, numbers or text of the same shape, or fill them up with "
    "'data.collate={_target_: trainer.data.padding.Padding}'"
)


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


@dataclass(frozen=True)
class Request:
    """Asks a reader for the samples of a micro-batch.

    Attributes:
        first: the first number over all replicas in this request.
        numbers: of this replica's samples, in the order of a stream or of held-out data; for training on data
            read by index, their indices.
        reading: a new number begins a stream again.
        draws: for training on data read by index: what each sample's random numbers follow from, besides the
            seed and the epoch (see `trainer.data.loading.sampler.draws_of`).
    """

    epoch: int
    first: int
    numbers: Any  # a range or a list
    reading: int = 0
    draws: Sequence[int] = ()


class Answer(NamedTuple):
    """What a reader gives for a request.

    Attributes:
        belonging: held-out data: the numbers of its samples; a stream to train on: where its shards are now.
        first: hashes of samples that are the same on all ranks, by their numbers, in the first answer of a
            process: of the first ones of a stream, or of sample 0 of data read by index.
    """

    batch: Any
    belonging: Any
    first: dict[int, int] = {}  # noqa: RUF012, never changed

    def pin_memory(self) -> "Answer":
        """Called by torch's DataLoader, whose own walk pins no dataclasses."""
        return self._replace(batch=mapped(self.batch, _pinned))


def _pinned(value: Any) -> Any:
    return value.pin_memory() if callable(getattr(value, "pin_memory", None)) else value


class Reader(Dataset[Any], ABC):
    """Answers requests. Created in the main process, used there or in data workers.

    Attributes:
        num_samples: of an epoch, if it is known.
        num_skipped: broken samples met so far, in all worker processes.
    """

    num_samples: int | None
    num_skipped = 0

    def __init__(self, dataset: Any, share: Share) -> None:
        self.dataset, self.seed, self.collate = dataset, share.seed, share.collate
        self.heartbeat = share.heartbeat or Heartbeat()

    def __getitems__(self, request: Request) -> Any:
        """The answer, or an exception (see `answer`)."""
        try:
            return answer(self._answer, request)
        finally:
            self.heartbeat.rest()

    @abstractmethod
    def _answer(self, request: Request) -> Any:
        """An `Answer`; None if no replica has samples of the request."""


class IndexReader(Reader):
    """Reads batches of a map-style dataset.

    A dataset with ``__getitems__`` returns whole batches and is taken to be deterministic; one that also has
    ``draw(indices, numbers)`` makes its training batches with a random number for each sample, a
    uint64 that follows from (seed, epoch, index, how often the index came before in the epoch) alone. Any
    other is read sample by sample, and Python's, NumPy's and torch's generators are seeded from the same four
    before each ``__getitem__``. So augmentation does not depend on the world size, the number of workers, or
    where a run was resumed, and copies of a sample differ.
    Random numbers that ``data.collate`` draws follow from the last sample. Reading in the main process
    restores its generators.

    Args:
        on_bad_sample: ``raise``, or ``skip``: count it in ``num_skipped`` and continue without it.
    """

    num_samples: int

    def __init__(self, dataset: Dataset[Any], share: Share, on_bad_sample: str) -> None:
        super().__init__(dataset, share)
        self.num_samples = len(dataset)  # type: ignore[arg-type]
        self.in_batches = fetches_batches(dataset)
        # Shared, since worker processes count. Its lock takes a millisecond to create.
        counts = on_bad_sample == "skip" and not self.in_batches
        self._num_skipped = multiprocessing.Value("q") if counts else None

    @property
    def num_skipped(self) -> int:  # type: ignore[override]
        return self._num_skipped.value if self._num_skipped else 0

    def _read(self, epoch: int, index: int, draw: int) -> Any | None:
        """The sample, or None if it is broken and may be skipped."""
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
        """The sample, or the next one that can be read, so that every batch is full."""
        for further in range(MAX_REPLACEMENTS):
            # An index may be beyond the number of samples of an epoch, as those of a Mixture.
            sample = self._read(epoch, (index + further) % self.num_samples if further else index, draw)
            if sample is not None:
                return sample
        raise UserError(
            f"{MAX_REPLACEMENTS} samples in a row from index {index} on cannot be read; "
            "data.on_bad_sample=raise shows why"
        )


class TrainReader(IndexReader):
    """Answers with a batch alone; a skipped sample is replaced by the next one."""

    _epoch: int | None = None

    def __init__(self, dataset: Dataset[Any], share: Share, on_bad_sample: str) -> None:
        super().__init__(dataset, share, on_bad_sample)
        self._has_told = multiprocessing.RawValue("b")  # shared by the workers of all epochs

    def start_epoch(self, epoch: int) -> None:
        """Tell the dataset which epoch is read: here, and in each data worker before its first batch."""
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
                    self._read_or_next(epoch, *one) for one in zip(indices, request.draws, strict=True)
                ]
                batch = collated(samples, self.dataset, indices, self.collate)
        return Answer(batch, {}, self._sample_0(epoch))

    def _sample_0(self, epoch: int) -> dict[int, int]:
        """Return the hash of sample 0 by its number, once, if it can be read; the first worker does this.

        Warns if the sample differs when it is read again with the same random numbers.
        """
        if self._has_told.value or getattr(get_worker_info(), "id", False):
            return {}
        self._has_told.value = 1
        self.heartbeat.read(0)
        try:
            with generators_kept(of_accelerators=False):
                first, again = self._hash_of_sample_0(epoch), self._hash_of_sample_0(epoch)
        except BROKEN_DATA:
            return {}
        if first != again:
            logger.warning(
                "sample 0 of %s differs when it is read twice with the same random numbers: samples then "
                "depend on the number of ranks and workers, and differ after a resume; draw from torch's, "
                "NumPy's or Python's global generator, which are seeded for each sample, or seed a generator "
                "of your own from the index",
                name_of(self.dataset),
            )
        return {0: first}

    def _hash_of_sample_0(self, epoch: int) -> int:
        seed_generators(self.seed, epoch, 0)
        return checksum(self.dataset.__getitems__([0]) if self.in_batches else self.dataset[0])


class EvalReader(IndexReader):
    """Answers with a batch and its indices; a skipped sample is left out of both.

    Without any sample, one sample fills in and the indices are empty.
    """

    def _answer(self, request: Request) -> Answer | None:
        if request.first >= self.num_samples:
            return None
        asked = [index for index in request.numbers if index < self.num_samples]
        indices = asked or [0]
        if self.in_batches:
            self.heartbeat.read(indices[0])
            fetched = self.dataset.__getitems__(indices)
            return Answer(collated_batch(fetched, self.dataset, indices, self.collate), asked)
        with generators_kept(of_accelerators=False):
            read = [(index, sample) for index in asked if (sample := self._read(0, index, index)) is not None]
            samples = [sample for _, sample in read] or [self._read_or_next(0, 0, 0)]
            batch = collated(samples, self.dataset, indices, self.collate)
            return Answer(batch, [index for index, _ in read])


def collated_batch(fetched: Any, dataset: Any, indices: Sequence[int], collate: Collate) -> Any:
    """What `__getitems__` returned as a batch: torch lets it return a list of samples or a batch.

    Raises:
        UserError: it is a batch, and `collate` is not torch's; or a list of another length; or as `collated`.
    """
    if isinstance(fetched, list):
        if len(fetched) != len(indices):
            raise UserError(
                f"{name_of(dataset)}.__getitems__ returned a list of {len(fetched)} for {len(indices)} "
                "indices; return a list with a sample for each, or a whole batch as a tuple, dict or tensor"
            )
        return collated(fetched, dataset, indices, collate)
    if collate is not default_collate:
        raise UserError(
            f"data.collate makes batches of samples, but {name_of(dataset)}.__getitems__ returns whole "
            "batches; have it return a list of samples, or set data.collate=null"
        )
    return fetched


def collated(samples: list[Any], dataset: Any, indices: Sequence[int], collate: Collate) -> Any:
    """The batch of `samples`.

    Raises:
        UserError: `collate` fails, or returns nothing; names the first sample for which it fails with the
            first of the batch.
    """
    try:
        batch = collate(samples)
    except Exception as error:
        way_out = "it was raised by data.collate" if collate is not default_collate else _UNEQUAL
        for index, sample in zip(indices, samples, strict=False):
            try:
                collate([samples[0], sample])
            except Exception as of_pair:
                beside = "" if index == indices[0] else f" with {sample_name(dataset, indices[0])}"
                raise UserError(
                    f"{sample_name(dataset, index)} cannot be in a batch{beside}: "
                    f"{on_one_line(of_pair)}; {way_out}"
                ) from error
        raise
    if batch is None:
        raise UserError("data.collate returns None; have it return the batch")
    return batch


def sample_name(dataset: Any, index: int) -> str:
    """The sample in words; of a mixture, as that of its own dataset."""
    if hasattr(dataset, "origin_of_sample"):
        return sample_name(*dataset.origin_of_sample(index))
    return f"sample {index} of {name_of(dataset)}"


def name_of(dataset: Any) -> str:
    """The name of the dataset's class, without the wrappers that settings put around it."""
    return getattr(dataset, "class_name", type(dataset).__name__)


def fetches_batches(dataset: Dataset[Any]) -> bool:
    """Whether the dataset returns whole batches. A Subset always does, so ask the dataset behind it."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))  # None hides that of a base class


def set_epoch(dataset: Any, epoch: int) -> None:
    """Call `set_epoch` of the dataset, or of those that a Subset, ConcatDataset or Mixture is made of."""
    if callable(own := getattr(dataset, "set_epoch", None)):
        own(epoch)
    elif isinstance(dataset, Subset):
        set_epoch(dataset.dataset, epoch)
    elif isinstance(parts := getattr(dataset, "datasets", None), list | tuple):
        for part in parts:
            set_epoch(part, epoch)


def checksum(sample: Any) -> int:
    """Of the numbers, texts, tensors, arrays and images in it; of an array of objects nothing."""
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
    """The sample. Raises ValueError, as for broken data, if it is None: no batch can hold it."""
    if (sample := dataset[index]) is None:
        raise ValueError("it is None")
    return sample


def random_numbers(seed: int, epoch: int, indices: Sequence[int]) -> np.ndarray:
    """A uint64 for each index, from the three alone. A thousand cost as much as seeding one generator.

    Source: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", 2014 (SplitMix64).
    """
    begin = np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)
    mixed = begin + np.asarray(indices, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def seed_generators(seed: int, epoch: int, index: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generators from the three."""
    words = np.random.SeedSequence((seed, epoch, index)).generate_state(4).tolist()
    random.seed(words[0])
    np.random.seed(words[1:3])
    torch.default_generator.manual_seed(words[3])  # torch.manual_seed would reseed the GPUs too
