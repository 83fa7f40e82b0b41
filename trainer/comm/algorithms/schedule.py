"""An all-reduce as data: what one rank sends, receives, adds and copies, round by round.

A schedule contains no tensors and needs no network. The executor runs it, a test verifies it, and the traffic
counter and the cost model read it. The schedules of all ranks must follow four rules:

- A message sent in round k is received in round k, so every rank's schedule has the same number of rounds.
- A send reads the chunk as it is after the previous rounds.
- A rank adds nothing to parts that it has sent, so that peers may read a message from the bucket itself until
  the finished sum arrives.
- Only one rank, the owner of a part, computes the final sum of the part, in a fixed order, and the other
  ranks copy it, so that all ranks end with the same bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby


class Kind(Enum):
    SEND = "send"  # send the chunk to the peer
    ADD = "add"  # add what the peer sends to the chunk
    COPY = "copy"  # overwrite the chunk with what the peer sends


@dataclass(frozen=True, slots=True)
class Op:
    """One message to or from a peer. It carries the parts [begin, end) of the bucket."""

    kind: Kind
    peer: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Phase:
    """`repeat` rounds of the same ops, where each round moves every chunk back by its width within `ring`.

    Repetition keeps the schedules of thousands of ranks small: a ring has two phases for any world size.
    """

    ops: tuple[Op, ...]
    repeat: int = 1
    ring: tuple[int, int] = (0, 1)  # the parts [low, high) within which chunks move

    def round(self, index: int) -> tuple[Op, ...]:
        if index == 0:
            return self.ops
        low, high = self.ring
        moved = []
        for op in self.ops:
            width = op.end - op.begin
            begin = low + (op.begin - low - index * width) % (high - low)
            moved.append(Op(op.kind, op.peer, begin, begin + width))
        return tuple(moved)


def in_phases(rounds: Sequence[Sequence[Op]]) -> tuple[Phase, ...]:
    """Return a phase for each round; consecutive idle rounds, which large trees have, share a phase."""
    phases: list[Phase] = []
    for idle, run in groupby(map(tuple, rounds), key=lambda ops: not ops):
        same = list(run)
        phases += [Phase((), len(same))] if idle else map(Phase, same)
    return tuple(phases)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One rank's part in an all-reduce of a bucket that has `parts` parts of nearly equal size."""

    parts: int
    reduce: tuple[Phase, ...]
    owned: tuple[int, int]  # after `reduce`, only this rank has the sums of the parts [begin, end)
    gather: tuple[Phase, ...]

    @property
    def num_reduce_rounds(self) -> int:
        return sum(phase.repeat for phase in self.reduce)

    @property
    def num_rounds(self) -> int:
        return self.num_reduce_rounds + sum(phase.repeat for phase in self.gather)

    def rounds(self) -> Iterator[tuple[Op, ...]]:
        for phase in (*self.reduce, *self.gather):
            for index in range(phase.repeat):
                yield phase.round(index)

    def peers(self, *kinds: Kind) -> list[int]:
        """Return, in order, the ranks with which this rank has ops of the given kinds."""
        return sorted({op.peer for op in self._ops() if op.kind in kinds})

    def _ops(self) -> Iterator[Op]:
        return (op for phase in (*self.reduce, *self.gather) for op in phase.ops)

    def boundary(self, part: int, numel: int) -> int:
        """Return the first element of `part` in a bucket of `numel` elements; for `parts`, its end."""
        return part * numel // self.parts
