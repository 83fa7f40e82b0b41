"""Readers of streams, which run in the main process or in data workers."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from trainer.data.loading.reader import (
    BROKEN_DATA,
    Answer,
    LoaderOptions,
    Reader,
    Request,
    checksum,
    collated,
    seed_generators,
)
from trainer.data.stream import has_state
from trainer.errors import UserError, is_retryable
from trainer.tensors.generators import generators_kept
from trainer.torch_private import outside_data_worker

END: Any = object()  # in place of a sample
_NUM_COMPARED = 8  # samples of a stream that are compared across ranks


@dataclass(frozen=True)
class StreamPosition:
    """A position in an epoch: per shard, the number of samples read and the stream's own state."""

    num_shards: int = 1
    epoch: int = 0
    shards: Mapping[int, tuple[int, Any]] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        shards = {str(shard): list(state) for shard, state in self.shards.items()}
        return {"num_shards": self.num_shards, "epoch": self.epoch, "shards": shards}

    @classmethod
    def merged(cls, saved: list[dict[str, Any]]) -> "StreamPosition":
        """Merge the positions that all ranks saved in the same epoch, each for its own shards."""
        position = cls(saved[0]["num_shards"], saved[0]["epoch"])
        for part in saved:
            shards = {int(shard): tuple(state) for shard, state in part["shards"].items()}
            position = position.advanced(shards)
        return position

    def advanced(self, shards: Mapping[int, tuple[int, Any]]) -> "StreamPosition":
        """Return the position with the larger count for each shard, since workers may share a shard."""
        latest = {
            shard: max(state, self.shards.get(shard, state), key=lambda state: state[0])
            for shard, state in shards.items()
        }
        return StreamPosition(self.num_shards, self.epoch, {**self.shards, **latest})


class Cursor:
    """Reads a stream, or a shard of a stream, forward through one epoch.

    Args:
        position: number of samples of the epoch that have been read.
        state: state of the stream at `position`.
        before_read: called with each position before it is read.
    """

    def __init__(
        self, stream: Any, epoch: int, position: int, state: Any, before_read: Callable[[int], None]
    ) -> None:
        self._stream, self._before_read = stream, before_read
        self.position = position
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(epoch)
        if has_state(stream):
            stream.load_state_dict(copy.deepcopy(state))
        self._items = iter(stream)
        self._last: Any = None
        self.first: dict[int, int] = {}  # hashes of the first samples, by their positions

    def read(self, position: int) -> Any:
        """Read up to the sample at `position`, and return it, or END if the stream has ended."""
        while self.position <= position:
            self._before_read(self.position)
            if (item := next(self._items, END)) is END:
                return END
            if len(self.first) < _NUM_COMPARED:
                self.first[self.position] = checksum(item)
            self._last = item
            self.position += 1
        return self._last

    def state(self) -> tuple[int, Any]:
        """Return the position, and the state of the stream at that position."""
        return self.position, copy.deepcopy(self._stream.state_dict())


class StreamReader(Reader):
    """Answers requests by reading the stream forward.

    Args:
        num_streams: if set, the number of replicas, each of which has its own stream (a shard).
    """

    def __init__(
        self, stream: Any, options: LoaderOptions, sharded: bool = False, num_streams: int | None = None
    ) -> None:
        super().__init__(stream, options)
        if sharded and not (hasattr(stream, "shard") and getattr(stream, "num_shards", 0) > 0):
            raise UserError(
                f"data.sharded=true needs the attributes num_shards and shard of trainer.data.stream.Stream, "
                f"which {type(stream).__name__} does not have; set data.sharded=false"
            )
        self.num_shards: int = stream.num_shards if sharded else num_streams or 1
        shards = {options.replica if num_streams else 0: stream}
        if sharded:
            shards = {i: stream.shard(self.num_shards, i) for i in range(self.num_shards)}
        # Every epoch starts from the shards' states before anything is read.
        self._shards = {i: (shard, _state_of(shard)) for i, shard in shards.items()}
        self.keeps_state = has_state(stream)
        self.num_samples = None if num_streams else _length(stream)
        self.start = StreamPosition()  # where a resumed run continues; set before the first request
        self._reading: int | None = None
        self._cursors: dict[int, Cursor] = {}
        self._number = 0  # number of the sample being read
        self._has_hashed = False

    def _answer(self, request: Request) -> Any:
        if request.reading != self._reading:
            self._reading, self._cursors = request.reading, {}
        with generators_kept(of_accelerators=False):
            with self._explain_broken_data(), outside_data_worker():
                read = self._read(request)
            if read is None:
                return None
            samples, metadata = read
            batch = collated(samples, self.dataset, request.numbers, self.collate)
        return Answer(batch, metadata, self._hashes())

    @abstractmethod
    def _read(self, request: Request) -> tuple[list[Any], Any] | None:
        """Return the samples of a batch and the metadata of the answer; None at the end of the stream."""

    def _hashes(self) -> dict[int, int]:
        """Return hashes of the first samples, for the first answer, if all ranks read the same stream."""
        if self._has_hashed or hasattr(self.dataset, "divides_itself"):
            return {}
        self._has_hashed = True
        return {
            position * self.num_shards + shard: value
            for shard, cursor in self._cursors.items()
            for position, value in cursor.first.items()
        }

    def _samples(self, request: Request) -> list[Any]:
        samples = []
        for number in request.numbers:
            item = self._cursor(request, number % self.num_shards).read(number // self.num_shards)
            if item is END:
                break
            samples.append(self._decode(item))
        return samples

    def _decode(self, item: Any) -> Any:
        sample = self.dataset.decode(item) if hasattr(self.dataset, "decode") else item
        if sample is None:
            raise ValueError("the stream returned None")
        return sample

    def _cursor(self, request: Request, shard: int) -> Cursor:
        if shard not in self._cursors:
            stream, initial_state = self._shards[shard]
            position, state = 0, initial_state
            if self.keeps_state and self.start.epoch == request.epoch:
                saved = self.start.shards.get(shard, (0, initial_state))
                if saved[0] <= -(-(request.first - shard) // self.num_shards):
                    position, state = saved

            def before_read(position: int) -> None:
                self._number = position * self.num_shards + shard
                self.heartbeat.read(self._number)
                seed_generators(self.seed, request.epoch, self._number)

            self._cursors[shard] = Cursor(stream, request.epoch, position, state, before_read)
        return self._cursors[shard]

    @contextmanager
    def _explain_broken_data(self) -> Iterator[None]:
        try:
            yield
        except BROKEN_DATA as error:
            if isinstance(error, UserError) or is_retryable(error):
                raise
            raise UserError(
                f"sample {self._number} of {type(self.dataset).__name__} cannot be read: {error}; fix it, or "
                "skip it in the stream"
            ) from error


class TrainStreamReader(StreamReader):
    """Reads training batches with the positions of their shards; None if the stream ends first."""

    def _read(self, request: Request) -> tuple[list[Any], dict[int, tuple[int, Any]]] | None:
        samples = self._samples(request)
        if len(samples) < len(request.numbers):
            return None
        shards = {number % self.num_shards for number in request.numbers} if self.keeps_state else ()
        return samples, {shard: self._cursors[shard].state() for shard in shards}


class EvalStreamReader(StreamReader):
    """Reads batches with the samples' indices, or a filler sample; None when no replica has samples left."""

    def _read(self, request: Request) -> tuple[list[Any], list[int]] | None:
        if (filler := self._cursor(request, 0).read(request.first)) is END:
            return None
        samples = self._samples(request)
        return samples or [self._decode(filler)], list(request.numbers[: len(samples)])


def _state_of(stream: Any) -> dict[str, Any] | None:
    return stream.state_dict() if has_state(stream) else None


def _length(stream: Any) -> int | None:
    try:
        return len(stream)
    except TypeError:  # a base class may have a __len__ that raises it
        return None
