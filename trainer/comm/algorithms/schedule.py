"""An all-reduce as data: what one rank sends, receives, adds and copies, round by round.

A schedule contains no tensors and no network. The executor runs it, a test proves it, the traffic
counter and the cost model read it. Four rules make a family of schedules (one per rank) valid:

- a message sent in round k is received in round k, so every rank's schedule has the same number of rounds;
- a send reads the chunk as the rounds before left it;
- a rank adds nothing to parts that it has sent, so that a message may be read where it stands, until the
  finished sum comes;
- one rank, the part's owner, computes the final sum of each part in one fixed order, and the others copy it,
  so that all ranks end with the same bits.
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
    """One message with a peer: the chunk is the parts [begin, end) of the bucket."""

    kind: Kind
    peer: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Phase:
    """`repeat` rounds of the same ops; each round moves every chunk back by its own width within `ring`.

    The repetition keeps the schedule of thousands of ranks small: a ring is two phases at any world size.
    """

    ops: tuple[Op, ...]
    repeat: int = 1
    ring: tuple[int, int] = (0, 1)  # the parts [low, high) within which chunks move

    def round(self, index: int) -> tuple[Op, ...]:
        """The ops of repetition `index`."""
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
    """A phase for each round, and one for consecutive idle rounds, the most common in a large tree."""
    phases: list[Phase] = []
    for idle, run in groupby(map(tuple, rounds), key=lambda ops: not ops):
        alike = list(run)
        phases += [Phase((), len(alike))] if idle else map(Phase, alike)
    return tuple(phases)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One rank's part in an all-reduce of a bucket of `parts` nearly equal parts."""

    parts: int
    reduce: tuple[Phase, ...]
    owned: tuple[int, int]  # after `reduce` this rank alone holds the sum of the parts [begin, end)
    gather: tuple[Phase, ...]

    @property
    def num_reduce_rounds(self) -> int:
        return sum(phase.repeat for phase in self.reduce)

    @property
    def num_rounds(self) -> int:
        return self.num_reduce_rounds + sum(phase.repeat for phase in self.gather)

    def rounds(self) -> Iterator[tuple[Op, ...]]:
        """The rounds in order, made one at a time."""
        for phase in (*self.reduce, *self.gather):
            for index in range(phase.repeat):
                yield phase.round(index)

    def peers(self, *kinds: Kind) -> list[int]:
        """The ranks with which this one has moves of the given kinds, in order."""
        return sorted({op.peer for op in self._ops() if op.kind in kinds})

    def _ops(self) -> Iterator[Op]:
        return (op for phase in (*self.reduce, *self.gather) for op in phase.ops)

    def boundary(self, part: int, numel: int) -> int:
        """The first element of `part` in a bucket of `numel` elements; part `parts` begins at its end."""
        return part * numel // self.parts
