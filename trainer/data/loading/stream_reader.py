"""How a stream is read: samples by their numbers, in the main process or in data workers."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from trainer.data.loading.reader import (
    BROKEN_DATA,
    Answer,
    Reader,
    Request,
    Share,
    checksum,
    collated,
    seed_generators,
)
from trainer.data.stream import has_state
from trainer.errors import UserError, is_retryable
from trainer.tensors.generators import generators_kept
from trainer.torch_private import outside_data_worker

END: Any = object()  # in place of a sample
_NUM_COMPARED = 8  # samples of a stream, by all ranks that read them


@dataclass(frozen=True)
class StreamPosition:
    """The position of a stream in an epoch: for each shard, the samples read and the stream's own state."""

    num_shards: int = 1
    epoch: int = 0
    shards: Mapping[int, tuple[int, Any]] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        shards = {str(shard): list(there) for shard, there in self.shards.items()}
        return {"num_shards": self.num_shards, "epoch": self.epoch, "shards": shards}

    @classmethod
    def merged(cls, saved: list[dict[str, Any]]) -> "StreamPosition":
        """The position from what all ranks saved, each of its own shards; all are in the same epoch."""
        position = cls(saved[0]["num_shards"], saved[0]["epoch"])
        for part in saved:
            position = position.moved_on(
                {int(shard): tuple(there) for shard, there in part["shards"].items()}
            )
        return position

    def moved_on(self, shards: Mapping[int, tuple[int, Any]]) -> "StreamPosition":
        """The farther position in each shard: several workers read the same ones, each as far as it needs."""
        farther = {
            shard: max(there, self.shards.get(shard, there), key=lambda state: state[0])
            for shard, there in shards.items()
        }
        return StreamPosition(self.num_shards, self.epoch, {**self.shards, **farther})


class Cursor:
    """A stream, or a shard of one, read forward in one epoch.

    Attributes:
        position: how many samples of the epoch were read.
        first: hashes of the first samples that were read, by their positions.
    """

    def __init__(
        self, stream: Any, epoch: int, position: int, state: Any, before_each: Callable[[int], None]
    ) -> None:
        """``state`` is the stream's at ``position``; ``before_each`` gets the position to be read."""
        self._stream, self._before_each = stream, before_each
        self.position = position
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(epoch)
        if has_state(stream):
            stream.load_state_dict(copy.deepcopy(state))
        self._items = iter(stream)
        self._last: Any = None
        self.first: dict[int, int] = {}

    def read(self, position: int) -> Any:
        """Read on to the sample at ``position``, and return the last one that was read; END without it."""
        while self.position <= position:
            self._before_each(self.position)
            if (item := next(self._items, END)) is END:
                return END
            if len(self.first) < _NUM_COMPARED:
                self.first[self.position] = checksum(item)
            self._last = item
            self.position += 1
        return self._last

    def state(self) -> tuple[int, Any]:
        """Where the stream continues."""
        return self.position, copy.deepcopy(self._stream.state_dict())


class StreamReader(Reader):
    """Answers requests by reading the stream forward.

    Attributes:
        begin: where a resumed run continues; set before the first request.
    """

    def __init__(self, stream: Any, share: Share, sharded: bool = False, own_of: int | None = None) -> None:
        """``own_of`` replicas have a stream of their own, which is then one of as many shards."""
        super().__init__(stream, share)
        if sharded and not (hasattr(stream, "shard") and getattr(stream, "num_shards", 0) > 0):
            raise UserError(
                f"data.sharded is true, but {type(stream).__name__} lacks num_shards and shard of "
                "trainer.data.stream.Stream; set it to false"
            )
        self.num_shards: int = stream.num_shards if sharded else own_of or 1
        shards = {share.replica if own_of else 0: stream}
        if sharded:
            shards = {i: stream.shard(self.num_shards, i) for i in range(self.num_shards)}
        # Each with its state before anything is read: every epoch starts from it.
        self._shards = {i: (one, one.state_dict() if has_state(one) else None) for i, one in shards.items()}
        self.keeps_state = has_state(stream)
        self.num_samples = None if own_of else _length(stream)
        self.begin = StreamPosition()
        self._reading: int | None = None
        self._cursors: dict[int, Cursor] = {}
        self._number = 0  # of the sample being read
        self._has_told = False

    def _answer(self, request: Request) -> Any:
        if request.reading != self._reading:
            self._reading, self._cursors = request.reading, {}
        with generators_kept(of_accelerators=False):
            with self._reading_alone():
                read = self._read(request)
            if read is None:
                return None
            samples, belonging = read
            batch = collated(samples, self.dataset, request.numbers, self.collate)
        return Answer(batch, belonging, self._first_read())

    @abstractmethod
    def _read(self, request: Request) -> tuple[list[Any], Any] | None:
        """The samples of a batch, and what belongs to it."""

    def _first_read(self) -> dict[int, int]:
        """The hashes of the first samples by their numbers; once, unless the stream says who divides it."""
        if self._has_told or hasattr(self.dataset, "divides_itself"):
            return {}
        self._has_told = True
        return {
            position * self.num_shards + shard: value
            for shard, cursor in self._cursors.items()
            for position, value in cursor.first.items()
        }

    def _samples(self, request: Request) -> list[Any]:
        """The samples of the request, fewer at the end of the stream."""
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
            raise ValueError("it is None")
        return sample

    def _cursor(self, request: Request, shard: int) -> Cursor:
        if shard not in self._cursors:
            stream, beginning = self._shards[shard]
            position, state = 0, beginning
            if self.keeps_state and self.begin.epoch == request.epoch:
                there = self.begin.shards.get(shard, (0, beginning))
                if there[0] <= -(-(request.first - shard) // self.num_shards):
                    position, state = there

            def before_each(position: int) -> None:
                self._number = position * self.num_shards + shard
                self.heartbeat.read(self._number)
                seed_generators(self.seed, request.epoch, self._number)

            self._cursors[shard] = Cursor(stream, request.epoch, position, state, before_each)
        return self._cursors[shard]

    @contextmanager
    def _reading_alone(self) -> Iterator[None]:
        """Turn broken data into one message, and hide the data worker from the stream."""
        try:
            with outside_data_worker():
                yield
        except BROKEN_DATA as error:
            if isinstance(error, UserError) or is_retryable(error):
                raise
            raise UserError(
                f"sample {self._number} of {type(self.dataset).__name__} cannot be read: {error}; fix it, or "
                "have the stream leave it out"
            ) from error


class TrainStreamReader(StreamReader):
    """Answers with a batch and its shards' part of a StreamPosition, or None if the stream ends before."""

    def _read(self, request: Request) -> tuple[list[Any], dict[int, tuple[int, Any]]] | None:
        samples = self._samples(request)
        if len(samples) < len(request.numbers):
            return None
        shards = {number % self.num_shards for number in request.numbers} if self.keeps_state else ()
        return samples, {shard: self._cursors[shard].state() for shard in shards}


class EvalStreamReader(StreamReader):
    """Answers with a batch and the numbers of its samples, or None if all replicas are at the end.

    A replica without samples left gets a filler, and no numbers.
    """

    def _read(self, request: Request) -> tuple[list[Any], list[int]] | None:
        if (filler := self._cursor(request, 0).read(request.first)) is END:
            return None
        samples = self._samples(request)
        return samples or [self._decode(filler)], list(request.numbers[: len(samples)])


def _length(stream: Any) -> int | None:
    try:
        return len(stream)
    except TypeError:  # also of a class that has __len__ for others to fill in
        return None
