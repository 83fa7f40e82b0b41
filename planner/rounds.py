"""All ranks' rounds as arrays; if the world repeats itself, those of one block of it.

Equal hosts with equal ranks (and hosts that share a switch, if switches count) often do the same: the ranks r
and r + block then have the same schedule except for their peers, and their clocks always show the same time.
So one block is enough, if a message out of it stands for one into it. This is checked, not assumed: at every
peer of the block, and at some further ranks.

Otherwise, as where switches divide the hosts unevenly, every rank's schedule is built.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, zip_longest

import numpy as np

from trainer.comm.algorithms.schedule import Kind, Phase, Schedule

_SAMPLES = 64  # ranks whose schedules are compared, beside the peers of the first block


class Family(Sequence[Schedule]):
    """The schedules of all ranks, each built at its first use."""

    def __init__(self, build: Callable[[int], Schedule], world_size: int) -> None:
        self._build, self._world_size = build, world_size
        self.built: dict[int, Schedule] = {}

    def __len__(self) -> int:
        return self._world_size

    def __getitem__(self, rank: int) -> Schedule:  # type: ignore[override]
        if rank not in self.built:
            self.built[rank] = self._build(rank)
        return self.built[rank]


@dataclass(frozen=True)
class Round:
    """All messages of one round, one array element each, in the order of senders."""

    repeat: int
    source: np.ndarray
    target: np.ndarray
    share: np.ndarray  # of the bucket
    fresh: np.ndarray  # not a chunk that its sender has just copied for another receiver
    send_turn: np.ndarray  # this message is the sender's n-th of the round
    adds: np.ndarray
    receive_turn: np.ndarray


def rounds(schedules: Sequence[Schedule], hosts: Sequence[int], together: int) -> tuple[int, list[Round]]:
    """The ranks of one block, and the rounds in which they send; targets may be in other blocks.

    Args:
        hosts: index of the host of every rank.
        together: hosts that a block must not separate: those of a switch.
    """
    places, size = np.asarray(hosts), len(hosts)
    return _of_one_block(schedules, places, together) or (size, list(_rounds(schedules, size)))


def _of_one_block(
    schedules: Sequence[Schedule], places: np.ndarray, together: int
) -> tuple[int, list[Round]] | None:
    switches = places // together

    def near(rank: int, peer: int) -> tuple[bool, bool]:
        return places[peer] == places[rank], switches[peer] == switches[rank]

    block = _size(places, together)
    if not _repeats(places, block) or not _alike(
        schedules, block, lambda rank, peer, like, its: near(rank, peer) == near(like, its)
    ):
        return None
    found = list(_rounds(schedules, block))
    return (block, found) if all(_closed(round_, block) for round_ in found) else None


def _size(places: np.ndarray, num_hosts: int) -> int:
    """The number of ranks on the first `num_hosts` hosts."""
    return int(np.count_nonzero(places < places[0] + num_hosts))


def _repeats(places: np.ndarray, block: int) -> bool:
    """Whether blocks have equal hosts, numbered block after block."""
    if len(places) % block or len(places) == block:
        return False
    blocks = places.reshape(-1, block)
    shifted = np.arange(len(blocks))[:, None] * (blocks[0, -1] + 1)
    return blocks[0, 0] == 0 and bool((blocks == blocks[0] + shifted).all())


def _alike(
    schedules: Sequence[Schedule], block: int, corresponds: Callable[[int, int, int, int], bool]
) -> bool:
    """Whether each rank does the same as the one at its position in the first block.

    `corresponds` compares a rank and its peer with that one and its peer.
    """

    def moves(rank: int) -> list[tuple[tuple[object, ...], int]]:
        schedule = schedules[rank]
        return [
            ((phase.repeat, op.kind, op.end - op.begin, op.peer % block), op.peer)
            for phase in (*schedule.reduce, *schedule.gather)
            for op in phase.ops
        ]

    def does_as(rank: int, like: int) -> bool:
        both = zip_longest(moves(rank), first[like], fillvalue=((), 0))
        return all(one == other and corresponds(rank, peer, like, its) for (one, peer), (other, its) in both)

    step = max(1, len(schedules) // _SAMPLES - 1)  # rarely a multiple of a size in the world
    looked_at = {*_peers(schedules, range(block)), *range(len(schedules) - 1, -1, -step)}
    first = [moves(rank) for rank in range(block)]
    return all(does_as(rank, rank % block) for rank in looked_at)


def _peers(schedules: Sequence[Schedule], ranks: Sequence[int]) -> set[int]:
    return {peer for rank in ranks for peer in schedules[rank].peers(*Kind)}


def _closed(round_: Round, block: int) -> bool:
    """Whether each rank of the block receives, by turn, as much as is sent back into the block."""
    rank, turn = round_.target % block, round_.receive_turn
    turns = np.bincount(rank, minlength=block)
    arrivals = np.unique(rank * (turn.max(initial=0) + 1) + turn)
    return len(arrivals) == len(rank) and bool((turn < turns[rank]).all())


def _rounds(schedules: Sequence[Schedule], block: int) -> Iterator[Round]:
    """Consecutive equal rounds are one Round with their number."""
    ranks = range(block)
    if block < len(schedules):
        ranks = sorted({*ranks, *_peers(schedules, ranks)})  # type: ignore[assignment]
    phases = [(*schedules[rank].reduce, *schedules[rank].gather) for rank in ranks]
    ends = [list(accumulate(phase.repeat for phase in own)) for own in phases]
    current = [0] * len(phases)
    parts, begin = schedules[0].parts, 0
    for cut in sorted(set(chain.from_iterable(ends))):
        now = {rank: own[i] for rank, own, i in zip(ranks, phases, current, strict=True)}
        yield _messages(now, block, parts, cut - begin)
        begin = cut
        current = [i + (end[i] == cut) for i, end in zip(current, ends, strict=True)]


def _messages(phases: dict[int, Phase], block: int, parts: int, repeat: int) -> Round:
    """Join every send of the block with its receive; a pair's messages arrive in the order of sending."""
    sends: list[tuple[int, int, float, bool, int]] = []
    receipts: dict[tuple[int, int], list[tuple[bool, int]]] = {}
    for rank, phase in phases.items():
        num_sent = num_received = 0
        put = None
        for op in phase.ops:
            if op.kind is Kind.SEND:
                chunk = (op.begin, op.end)
                if rank < block:
                    sends.append((rank, op.peer, (op.end - op.begin) / parts, chunk != put, num_sent))
                num_sent, put = num_sent + 1, chunk
            else:
                if op.peer < block:
                    receipts.setdefault((op.peer, rank), []).append((op.kind is Kind.ADD, num_received))
                num_received += 1
    received = [receipts[source, target].pop(0) for source, target, *_ in sends]
    rows = [send + receipt for send, receipt in zip(sends, received, strict=True)]
    columns = list(zip(*rows, strict=True)) if rows else [()] * 7
    kinds = (np.intp, np.intp, np.float64, bool, np.intp, bool, np.intp)
    return Round(repeat, *(np.array(column, kind) for column, kind in zip(columns, kinds, strict=True)))
