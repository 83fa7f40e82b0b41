"""Apply a schedule to a bucket of known length, to determine what a rank sends and receives at each visit."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.comm.algorithms.pipeline import IN_FLIGHT, num_segments, segment_bounds, sweeps
from trainer.comm.algorithms.schedule import Kind, Op, Schedule

if TYPE_CHECKING:
    from torch import Tensor

_MAX_ITEMSIZE = 8  # bytes of an element


@dataclass(frozen=True, slots=True)
class Move:
    """One message, which carries the elements [begin, end) of the bucket."""

    kind: Kind
    peer: int
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin

    def chunk(self, sums: "Tensor") -> "Tensor":
        return sums[self.begin : self.end]

    def take(self, sums: "Tensor", received: "Tensor") -> None:
        if self.kind is Kind.ADD:
            self.chunk(sums).add_(received)
        else:
            self.chunk(sums).copy_(received)


@dataclass(frozen=True, slots=True)
class Visit:
    """Process `receives`, then complete the sum of the elements in `owned`, if any, then start `sends`."""

    receives: tuple[Move, ...]
    owned: tuple[int, int] | None
    sends: tuple[Move, ...]


def lay_out(
    schedule: Schedule, numel: int, itemsize: int, segment_bytes: int, width: int
) -> list[list[Visit]]:
    """Return the visits of each sweep over a bucket's segments; a sweep receives what the previous one sent.

    Args:
        itemsize: bytes per element on the wire.
        segment_bytes, width: see `trainer.comm.algorithms.pipeline`.
    """
    rounds = [*schedule.rounds(), ()]
    count = num_segments(numel, itemsize, segment_bytes)
    bounds = segment_bounds(numel, count)

    def visit(segment: int, k: int) -> Visit:
        arriving = _messages(schedule, rounds[k - 1], bounds[segment]) if k > 0 else ()
        receives = tuple(move for move in arriving if move.kind is not Kind.SEND)
        sending = _messages(schedule, rounds[k], bounds[segment])
        sends = tuple(move for move in sending if move.kind is Kind.SEND)
        low, high = _elements(schedule, *schedule.owned, bounds[segment])
        owned = (low, high) if low < high and k == schedule.num_reduce_rounds else None
        return Visit(receives, owned, sends)

    return [
        [visit(segment, k) for segment, k in sweep]
        for sweep in sweeps(len(bounds), schedule.num_rounds, width)
    ]


def _elements(schedule: Schedule, begin: int, end: int, segment: tuple[int, int]) -> tuple[int, int]:
    first, last = segment
    return first + schedule.boundary(begin, last - first), first + schedule.boundary(end, last - first)


def _messages(schedule: Schedule, ops: Sequence[Op], segment: tuple[int, int]) -> Iterator[Move]:
    for op in ops:
        begin, end = _elements(schedule, op.begin, op.end, segment)
        if begin < end:
            yield Move(op.kind, op.peer, begin, end)


def messages_in_flight(schedule: Schedule) -> int:
    """Return the largest number of messages to a peer that it has not yet read.

    A message is read at the next visit of its segment, so each segment in flight has the messages of one
    round.
    """
    per_round = (Counter(op.peer for op in ops if op.kind is Kind.SEND) for ops in schedule.rounds())
    return IN_FLIGHT * max((max(peers.values(), default=0) for peers in per_round), default=0)


def chunks_in_flight(schedule: Schedule, width: int) -> int:
    """Return the largest number of chunks that peers have not yet read, plus those of one visit.

    Each segment in flight has the chunks of one round, and at most `width` segments are in the same round.
    """
    sizes = [len({(op.begin, op.end) for op in ops if op.kind is Kind.SEND}) for ops in schedule.rounds()]
    most = max(sizes, default=0)
    return min(width * sum(sizes), IN_FLIGHT * most) + most


def largest_chunk(schedule: Schedule, segment_bytes: int) -> int:
    """Return an upper limit for the bytes of a chunk; sizes of segments and parts differ by at most 1."""
    widest = max((op.end - op.begin for ops in schedule.rounds() for op in ops), default=0)
    return (segment_bytes + _MAX_ITEMSIZE) * widest // schedule.parts + 2 * _MAX_ITEMSIZE
