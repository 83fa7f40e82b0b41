"""Streams: data that can only be read forward.

A stream is a ``torch.utils.data.IterableDataset``, or any object with ``__iter__`` and no ``__getitem__``. It
yields the same samples in the same order on every rank and in every data worker, and the trainer divides
them. ``Stream`` lists the optional attributes and methods.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import IterableDataset


class Stream(Protocol):
    """The methods of a stream. Only ``__iter__`` is required.

    Streaming datasets of Hugging Face have all of these methods, except ``decode``.

    The global batch of a step consists of the next samples of the stream. Replica r of R uses samples r,
    r + R, ... and drops the others. Before each sample is read, the generators of Python, NumPy and torch are
    seeded from the seed, the epoch, and the number of the sample.
    """

    num_shards: int
    """The number of shards S, for ``data.sharded=true``. Sample i of an epoch is then sample i // S of shard
    i % S. A replica opens only the shards that it needs: S / R of them, if S is a multiple of the number of
    replicas R. The epoch ends with the first shard that ends."""

    divides_itself: bool
    """Whether the stream yields different samples on each rank, like those of webdataset, or of Hugging Face
    after split_dataset_by_node. An epoch then ends on all ranks when one rank has no samples left. Validation
    data must be the same on every rank. Without this attribute, ranks compare the first samples before step
    1; False disables the comparison."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of an epoch from its start."""

    def set_epoch(self, epoch: int) -> None:
        """Called before each ``__iter__``, so that epochs may differ in their order."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last sample that was yielded, as plain values and tensors."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next ``__iter__`` continue at ``state``, so that earlier samples are not read again."""

    def decode(self, item: Any) -> Any:
        """Convert an item of ``__iter__`` to a sample; called only for samples that this process uses."""

    def shard(self, num_shards: int, index: int) -> "Stream":
        """Return shard ``index`` of ``num_shards``, for ``data.sharded=true``."""

    def __len__(self) -> int:
        """Return the number of samples per epoch. Without this method, train.max_steps is required."""


def is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def has_state(stream: Any) -> bool:
    return hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")
