"""Data that is read forward only: what a stream may offer, and samples of one by their numbers.

A stream is a ``torch.utils.data.IterableDataset``, or any object with ``__iter__`` and no ``__getitem__``. It
gives the same samples in the same order on every rank and in every data worker, and leaves it to the harness
who takes which. ``Stream`` lists what else it may have.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import IterableDataset


class Stream(Protocol):
    """Only ``__iter__`` has to be there; streaming datasets of Hugging Face have all but ``decode``.

    The global batch of a step is the next B samples of the stream, of which replica r of R takes every R-th
    from the r-th on; the others it reads and drops. Before each is read, Python's, NumPy's and torch's
    generators are seeded from (seed, epoch, number of the sample).
    """

    num_shards: int
    """With ``data.sharded=true`` sample i of an epoch is number i // S of shard i % S, S being this number. A
    replica opens only those shards that it needs: one of R each, where R divides S. The first shard to end
    ends the epoch."""

    def __iter__(self) -> Iterator[Any]:
        """The samples of an epoch from its beginning; default_collate makes a batch of them."""

    def set_epoch(self, epoch: int) -> None:
        """Called before each ``__iter__``: an epoch may have an order of its own."""

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands after the sample that it gave last, in plain values and tensors."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next ``__iter__`` go on there; without the two, a resumed run reads all up to there."""

    def decode(self, item: Any) -> Any:
        """The sample, from what ``__iter__`` gave: called only for those that this process trains on."""

    def shard(self, num_shards: int, index: int) -> "Stream": ...

    def __len__(self) -> int:
        """Samples of an epoch. Without it their number is unknown, and train.max_steps has to be given."""


def is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def has_state(stream: Any) -> bool:
    return hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")
