"""Several streams as one, in given proportions."""

import copy
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from trainer.data.stream import has_state
from trainer.errors import UserError

_NEXT_PASS = 1_000_003  # added to the epoch: a stream that begins again may have another order


class StreamMixture(IterableDataset[Any]):
    """Streams, of which each sample of training is drawn by their weights: see `Mixture`.

    It yields (number of the part, item); `decode` makes the sample of it. Which part comes is drawn from
    Python's generator, which is seeded by (seed, epoch, number of the sample): so it is the same at any world
    size and after a resume.

    Args:
        parts: streams.
        weights: of the parts; None: each is read once, one after the other.
        num_samples: of an epoch, over all shards; None: as many as the parts have, if they know it.
    """

    def __init__(
        self, parts: Sequence[Any], weights: Sequence[float] | None, num_samples: int | None
    ) -> None:
        self.parts, self.weights, self._num_samples = parts, weights, num_samples
        if all(hasattr(part, "shard") and getattr(part, "num_shards", 0) > 0 for part in parts):
            self.num_shards = math.gcd(*(part.num_shards for part in parts))
        self._epoch, self._resumed = 0, False
        self._begins = [part.state_dict() if has_state(part) else None for part in parts]
        self._live = [False] * len(parts)  # whether a part is being read, so that it knows its own position
        self._rewind()

    def __len__(self) -> int:
        return sum(map(len, self.parts)) if self._num_samples is None else self._num_samples

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("parts", "num_shards", "state_dict", "load_state_dict"):
            raise AttributeError(name)
        return common(self.parts, name)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def shard(self, num_shards: int, index: int) -> "StreamMixture":
        parts = [part.shard(num_shards, index) for part in self.parts]
        num_samples = None if self._num_samples is None else (self._num_samples - index - 1) // num_shards + 1
        return StreamMixture(parts, self.weights, num_samples)

    def decode(self, item: Any) -> Any:
        number, of_part = item
        part = self.parts[number]
        return part.decode(of_part) if hasattr(part, "decode") else of_part

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        if not self._resumed:
            self._rewind()
        self._resumed, self._live = False, [False] * len(self.parts)
        if self.weights is None:
            for number in range(len(self.parts)):
                for item in self._read(number):
                    yield number, item
            return
        open_parts: dict[int, Iterator[Any]] = {}
        while self._num_samples is None or self._num_read < self._num_samples:
            [number] = random.choices(range(len(self.parts)), self.weights)
            if number not in open_parts:
                open_parts[number] = self._read(number)
            item = next(open_parts[number], _END)
            if item is _END:
                self._passes[number], self._states[number] = self._passes[number] + 1, self._begins[number]
                open_parts[number] = self._read(number)
                if (item := next(open_parts[number], _END)) is _END:
                    raise UserError(f"data.dataset.datasets[{number}] is empty; leave it out")
            self._num_read += 1
            yield number, item

    def _rewind(self) -> None:
        self._passes, self._states, self._num_read = [0] * len(self.parts), [*self._begins], 0

    def _read(self, number: int) -> Iterator[Any]:
        """The part from its present pass and state on."""
        part = self.parts[number]
        if hasattr(part, "set_epoch"):
            part.set_epoch(self._epoch + _NEXT_PASS * self._passes[number])
        if has_state(part):
            part.load_state_dict(copy.deepcopy(self._states[number]))
        items = iter(part)
        self._live[number] = True
        return items


class StatefulStreamMixture(StreamMixture):
    """A mixture of streams that all know their positions."""

    def shard(self, num_shards: int, index: int) -> "StatefulStreamMixture":
        of_shard = super().shard(num_shards, index)
        return StatefulStreamMixture(of_shard.parts, self.weights, of_shard._num_samples)

    def state_dict(self) -> dict[str, Any]:
        states = [
            part.state_dict() if live else state
            for part, live, state in zip(self.parts, self._live, self._states, strict=True)
        ]
        return {"passes": [*self._passes], "states": states, "num_read": self._num_read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._passes, self._states = [*state["passes"]], [*state["states"]]
        self._num_read, self._resumed = state["num_read"], True
        self._live = [False] * len(self.parts)


def common(datasets: Sequence[Any], name: str) -> Any:
    """The attribute that all have, with equal values; otherwise AttributeError."""
    values = [getattr(dataset, name) for dataset in datasets]
    if any(value != values[0] for value in values):
        raise AttributeError(f"{name} differs: {values}")
    return values[0]


_END = object()
