"""The contract of data loaders, which live for the whole run; loaders.py has them."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from trainer.data.loading.collation import Collate
from trainer.faults.heartbeat import Heartbeat


@dataclass(frozen=True)
class Share:
    """The share of each batch that a process reads, and how.

    Attributes:
        timeout_s: how long to wait for a batch from the workers.
        collate: makes a batch of a list of samples.
        mirrors: whether the device mirrors half of the training images, drawn from (seed, epoch, index).
    """

    replica: int
    seed: int
    device: torch.device
    timeout_s: float = 600
    heartbeat: Heartbeat | None = None
    collate: Collate = default_collate
    mirrors: bool = False


class Batches(Iterable[Any]):
    """The rest of an epoch: micro-batches that make up whole steps.

    Attributes:
        data_left: whether this rank has data for another step.
        accumulation: its micro-batches of a step.
    """

    data_left: bool
    accumulation: int

    @abstractmethod
    def ahead(self) -> list[Any]:
        """The micro-batches of the next step, read now and kept. Called between steps."""

    def first_read(self) -> Mapping[int, int]:
        """Hashes of the first samples of a stream, by their numbers, as this rank has read them."""
        return {}

    @abstractmethod
    def take(self) -> list[Any]:
        """The micro-batches of the next step; none if this rank's share of it has none."""

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches one by one, taken a step at a time."""
        while self.data_left and (step := self.take()):
            yield from step


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
