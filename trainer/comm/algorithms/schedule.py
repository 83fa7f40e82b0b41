"""A collective as data: what one rank sends, receives, adds and copies, round by round.

A schedule contains no tensors and no network. The executor runs it, the simulator proves it, the traffic
counter and the cost model read it. Three rules make a family of schedules (one per rank) valid:

- a message sent in round k is received in round k, so every rank's schedule has the same number of rounds;
- a send reads the chunk as the rounds before left it;
- one rank, the part's owner, computes the final sum of each part in one fixed order, and the others copy it,
  so that all ranks end with the same bits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import TypeVar

_Algorithm = TypeVar("_Algorithm")


class Collective(Enum):
    """What a family of schedules computes."""

    ALL_REDUCE = "all-reduce"  # every rank ends with the sum of every part
    ALL_GATHER = "all-gather"  # every rank starts with its own block, and ends with all blocks
    REDUCE_SCATTER = "reduce-scatter"  # every rank ends with the sum of its own block


def chosen(
    among: Mapping[str, _Algorithm], how: Collective, algorithm: str, rank: int, hosts: Sequence[int]
) -> _Algorithm:
    """The algorithm of that name, for a rank among `hosts`.

    Raises:
        ValueError: the algorithm or the rank does not exist.
    """
    if algorithm not in among:
        raise ValueError(f"no {how.value} algorithm {algorithm!r}; there are {', '.join(among)}")
    if not 0 <= rank < len(hosts):
        raise ValueError(f"rank {rank} is not among the {len(hosts)} ranks of hosts={list(hosts)}")
    return among[algorithm]


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
    With `forward`, chunks move on instead, as in a schedule that runs backwards.
    """

    ops: tuple[Op, ...]
    repeat: int = 1
    ring: tuple[int, int] = (0, 1)  # the parts [low, high) within which chunks move
    forward: bool = False

    def round(self, index: int) -> tuple[Op, ...]:
        """The ops of repetition `index`."""
        if index == 0:
            return self.ops
        low, high = self.ring
        moved = []
        for op in self.ops:
            width = op.end - op.begin
            step = width if self.forward else -width
            begin = low + (op.begin - low + index * step) % (high - low)
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
    """One rank's part in a collective over a bucket of `parts` nearly equal parts.

    An all-gather and a reduce-scatter have as many parts as ranks, each the block of one rank.
    """

    parts: int
    reduce: tuple[Phase, ...]
    owned: tuple[int, int]  # after `reduce` this rank alone holds the sum of the parts [begin, end)
    gather: tuple[Phase, ...]
    blocks: tuple[int, ...] | None = None  # the rank of each part's block; blocks are in the order of ranks

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

    @property
    def widest(self) -> int:
        """Parts in the longest message."""
        return max((op.end - op.begin for op in self._ops()), default=0)

    def _ops(self) -> Iterator[Op]:
        return (op for phase in (*self.reduce, *self.gather) for op in phase.ops)

    def boundary(self, part: int, numel: int) -> int:
        """The first element of `part` in a bucket of `numel` elements; part `parts` begins at its end."""
        return part * numel // self.parts
