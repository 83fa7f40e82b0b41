"""One rank's schedule, laid out over a bucket of known length: which elements move at which visit."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.comm.schedules.pipeline import IN_FLIGHT, num_segments, segment_bounds, sweeps
from trainer.comm.schedules.schedule import Kind, Op, Schedule


@dataclass(frozen=True, slots=True)
class Move:
    """One message: the elements [begin, end) of the bucket, never none."""

    kind: Kind
    peer: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Visit:
    """Take in `receives`, then finish the sum of `owned` if there is one, then let `sends` go."""

    receives: tuple[Move, ...]
    owned: tuple[int, int] | None
    sends: tuple[Move, ...]


def lay_out(
    schedule: Schedule, numel: int, itemsize: int, segment_bytes: int, width: int
) -> list[list[Visit]]:
    """The visits of one bucket, sweep by sweep; a sweep's receives are what the sweep before it sent.

    Args:
        itemsize: bytes of an element on the wire.
        segment_bytes, width: see `trainer.comm.schedules.pipeline`.
    """
    rounds = [*schedule.rounds(), ()]
    bounds = segment_bounds(numel, num_segments(numel, itemsize, segment_bytes))

    def visit(segment: int, k: int) -> Visit:
        arriving = _messages(schedule, rounds[k - 1], bounds[segment]) if k > 0 else ()
        receives = tuple(move for move in arriving if move.kind is not Kind.SEND)
        sends = tuple(m for m in _messages(schedule, rounds[k], bounds[segment]) if m.kind is Kind.SEND)
        begin, end = _elements(schedule, schedule.owned, bounds[segment])
        owned = (begin, end) if k == schedule.num_reduce_rounds and begin < end else None
        return Visit(receives, owned, sends)

    return [
        [visit(segment, k) for segment, k in sweep]
        for sweep in sweeps(len(bounds), schedule.num_rounds, width)
    ]


def _elements(schedule: Schedule, parts: tuple[int, int], segment: tuple[int, int]) -> tuple[int, int]:
    first, last = segment
    begin, end = (schedule.boundary(part, last - first) for part in parts)
    return first + begin, first + end


def _messages(schedule: Schedule, ops: Sequence[Op], segment: tuple[int, int]) -> Iterator[Move]:
    for op in ops:
        begin, end = _elements(schedule, (op.begin, op.end), segment)
        if begin < end:
            yield Move(op.kind, op.peer, begin, end)


def chunks_in_flight(schedule: Schedule, width: int) -> int:
    """Chunks of a rank, one after another, that hold all those whose readers have their visit still ahead.

    A chunk sent at one visit is read at the next of its segment. So at any visit there is, for each segment
    in flight, one round's at most; and no more than `width` segments are in the same round.
    """
    per_round = [{(op.begin, op.end) for op in ops if op.kind is Kind.SEND} for ops in schedule.rounds()]
    if per_round and schedule.num_reduce_rounds < len(per_round):
        per_round[schedule.num_reduce_rounds].add(schedule.owned)
    sizes = [len(chunks) for chunks in per_round]
    most = max(sizes, default=0)
    return min(width * sum(sizes), IN_FLIGHT * most) + most


def messages_in_flight(schedule: Schedule) -> int:
    """Messages from a rank to one peer whose visit that peer may have still ahead; see `chunks_in_flight`."""
    per_round = (Counter(op.peer for op in ops if op.kind is Kind.SEND) for ops in schedule.rounds())
    return IN_FLIGHT * max((max(peers.values(), default=0) for peers in per_round), default=0)
