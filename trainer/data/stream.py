"""Data that is only read forward: what a stream may offer.

A stream is a ``torch.utils.data.IterableDataset``, or any object with ``__iter__`` and no ``__getitem__``. It
yields the same samples in the same order on every rank and in every data worker; the harness decides who
takes which. ``Stream`` lists the optional attributes and methods.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import IterableDataset


class Stream(Protocol):
    """Only ``__iter__`` is required; streaming datasets of Hugging Face have all methods but ``decode``.

    The global batch of a step is the next B samples of the stream, of which replica r of R takes every R-th
    from the r-th on and drops the others. Before each is read, the generators of
    Python, NumPy and torch are seeded from (seed, epoch, number of the sample).
    """

    num_shards: int
    """With ``data.sharded=true`` sample i of an epoch is number i // S of shard i % S, where S is this
    number. A replica opens only the shards that it needs: one of R each, if R divides S. The epoch ends with
    the first shard that ends."""

    divides_itself: bool
    """True: on each rank it yields samples of its own, as webdataset's do, and Hugging Face's after
    split_dataset_by_node. An epoch ends with the rank that has the fewest samples; samples left on others
    are not used. Held-out data must be the same on every rank. Without this attribute ranks compare the first
    samples before step 1; False skips that."""

    def __iter__(self) -> Iterator[Any]:
        """The samples of an epoch from its beginning; default_collate makes batches of them."""

    def set_epoch(self, epoch: int) -> None:
        """Called before each ``__iter__``: each epoch may have another order."""

    def state_dict(self) -> dict[str, Any]:
        """The position after the last sample returned, in plain values and tensors."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next ``__iter__`` continue there. Without both, a resumed run reads everything before."""

    def decode(self, item: Any) -> Any:
        """The sample, from what ``__iter__`` yielded; called only for samples that this process trains on."""

    def shard(self, num_shards: int, index: int) -> "Stream":
        """Shard ``index`` of ``num_shards``, for ``data.sharded=true``."""

    def __len__(self) -> int:
        """Samples of an epoch. Without it their number is unknown, and train.max_steps is required."""


def is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def has_state(stream: Any) -> bool:
    return hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")
