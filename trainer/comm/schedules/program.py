"""One rank's schedule, laid out over a bucket of known length: which elements move at which visit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.comm.schedules.algorithms import Kind, Op, Schedule
from trainer.comm.schedules.pipeline import num_segments, segment_bounds, visits


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
    sweeps: list[list[Visit]] = []
    for segment, k in visits(len(bounds), schedule.num_rounds, width):
        arriving = _messages(schedule, rounds[k - 1], bounds[segment]) if k > 0 else ()
        receives = tuple(move for move in arriving if move.kind is not Kind.SEND)
        sends = tuple(m for m in _messages(schedule, rounds[k], bounds[segment]) if m.kind is Kind.SEND)
        begin, end = _elements(schedule, schedule.owned, bounds[segment])
        owned = (begin, end) if k == schedule.num_reduce_rounds and begin < end else None
        if segment // width + k == len(sweeps):
            sweeps.append([])
        sweeps[-1].append(Visit(receives, owned, sends))
    return sweeps


def _elements(schedule: Schedule, parts: tuple[int, int], segment: tuple[int, int]) -> tuple[int, int]:
    first, last = segment
    begin, end = (schedule.boundary(part, last - first) for part in parts)
    return first + begin, first + end


def _messages(schedule: Schedule, ops: Sequence[Op], segment: tuple[int, int]) -> Iterator[Move]:
    for op in ops:
        begin, end = _elements(schedule, (op.begin, op.end), segment)
        if begin < end:
            yield Move(op.kind, op.peer, begin, end)


def messages_per_sweep(schedule: Schedule, width: int) -> int:
    """The most messages of a rank that its peers, at work on the same sweep, may not have read yet.

    All ranks go through the visits in one order, so with room for this many no sender ever has to wait for
    a reader that waits for the sender.
    """
    per_round = [sum(op.kind is Kind.SEND for op in ops) for ops in schedule.rounds()]
    return width * sum(per_round) + max(per_round, default=0)
