"""The rounds of all ranks as arrays, or those of one block of ranks if all blocks are equal.

Equal hosts (or equal groups of hosts that share a switch) often have equal schedules: the schedules of ranks
r and r + block differ only in their peers, and their clocks always show the same time. So it is enough to
simulate one block, if for each message that leaves the block an equal message enters it. This is checked for
every peer of the block, and for some other ranks.

Otherwise, for example if switches divide the hosts unevenly, the schedule of every rank is built.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, zip_longest

import numpy as np

from trainer.comm.algorithms.schedule import Kind, Phase, Schedule

_SAMPLES = 64  # ranks whose schedules are compared, in addition to the peers of the first block


class Family(Sequence[Schedule]):
    """The schedules of all ranks, which are built when they are first used."""

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
    """All messages of one round, as arrays in the order of senders."""

    repeat: int
    source: np.ndarray
    target: np.ndarray
    share: np.ndarray  # fraction of the bucket
    fresh: np.ndarray  # False if the sender has just copied the same chunk for another receiver
    send_turn: np.ndarray  # number of the message among the sender's messages of the round
    adds: np.ndarray
    receive_turn: np.ndarray


def rounds(schedules: Sequence[Schedule], hosts: Sequence[int], together: int) -> tuple[int, list[Round]]:
    """Return the number of ranks in a block, and their rounds, which may include sends to other blocks.

    Args:
        hosts: index of the host of every rank.
        together: number of hosts that a block must not separate, because they share a switch.
    """
    host_of, size = np.asarray(hosts), len(hosts)
    return _rounds_of_block(schedules, host_of, together) or (size, list(_rounds(schedules, size)))


def _rounds_of_block(
    schedules: Sequence[Schedule], host_of: np.ndarray, together: int
) -> tuple[int, list[Round]] | None:
    """Return what `rounds` returns; None if the world does not consist of equal blocks."""
    switches = host_of // together

    def distance(rank: int, peer: int) -> tuple[bool, bool]:
        return host_of[peer] == host_of[rank], switches[peer] == switches[rank]

    block = _num_ranks(host_of, together)
    if not _repeats(host_of, block) or not _equal_blocks(
        schedules, block, lambda rank, peer, twin, its: distance(rank, peer) == distance(twin, its)
    ):
        return None
    of_block = list(_rounds(schedules, block))
    return (block, of_block) if all(_closed(round_, block) for round_ in of_block) else None


def _num_ranks(host_of: np.ndarray, num_hosts: int) -> int:
    return int(np.count_nonzero(host_of < host_of[0] + num_hosts))


def _repeats(host_of: np.ndarray, block: int) -> bool:
    """Return whether the ranks of all blocks are divided among hosts in the same way."""
    if len(host_of) % block or len(host_of) == block:
        return False
    blocks = host_of.reshape(-1, block)
    shifted = np.arange(len(blocks))[:, None] * (blocks[0, -1] + 1)
    return blocks[0, 0] == 0 and bool((blocks == blocks[0] + shifted).all())


def _equal_blocks(
    schedules: Sequence[Schedule], block: int, corresponds: Callable[[int, int, int, int], bool]
) -> bool:
    """Return whether each compared rank has the same schedule as its twin, its counterpart in the first
    block.

    `corresponds` compares a rank and its peer with the twin and the twin's peer.
    """

    def moves(rank: int) -> list[tuple[tuple[object, ...], int]]:
        schedule = schedules[rank]
        return [
            ((phase.repeat, op.kind, op.end - op.begin, op.peer % block), op.peer)
            for phase in (*schedule.reduce, *schedule.gather)
            for op in phase.ops
        ]

    def matches(rank: int, twin: int) -> bool:
        pairs = zip_longest(moves(rank), first[twin], fillvalue=((), 0))
        return all(a == b and corresponds(rank, peer, twin, its) for (a, peer), (b, its) in pairs)

    step = max(1, len(schedules) // _SAMPLES - 1)  # rarely a multiple of the block
    compared = {*_peers(schedules, range(block)), *range(len(schedules) - 1, -1, -step)}
    first = [moves(rank) for rank in range(block)]
    return all(matches(rank, rank % block) for rank in compared)


def _peers(schedules: Sequence[Schedule], ranks: Sequence[int]) -> set[int]:
    return {peer for rank in ranks for peer in schedules[rank].peers(*Kind)}


def _closed(round_: Round, block: int) -> bool:
    """Return whether each rank of the block receives, in turn, the messages that are sent into the block."""
    rank, turn = round_.target % block, round_.receive_turn
    turns = np.bincount(rank, minlength=block)
    arrivals = np.unique(rank * (turn.max(initial=0) + 1) + turn)
    return len(arrivals) == len(rank) and bool((turn < turns[rank]).all())


def _rounds(schedules: Sequence[Schedule], block: int) -> Iterator[Round]:
    ranks = range(block)
    if block < len(schedules):
        ranks = sorted({*ranks, *_peers(schedules, ranks)})  # type: ignore[assignment]
    phases = [(*schedules[rank].reduce, *schedules[rank].gather) for rank in ranks]
    ends = [list(accumulate(phase.repeat for phase in own)) for own in phases]
    current = [0] * len(phases)
    parts, start = schedules[0].parts, 0
    for cut in sorted(set(chain.from_iterable(ends))):
        active = {rank: own[i] for rank, own, i in zip(ranks, phases, current, strict=True)}
        yield _messages(active, block, parts, cut - start)
        start = cut
        current = [i + (end[i] == cut) for i, end in zip(current, ends, strict=True)]


def _messages(phases: dict[int, Phase], block: int, parts: int, repeat: int) -> Round:
    """Match each send of the block with its receive; messages between two ranks arrive in the order of
    sending.
    """
    sends: list[tuple[int, int, float, bool, int]] = []
    receipts: dict[tuple[int, int], list[tuple[bool, int]]] = {}
    for rank, phase in phases.items():
        num_sent = num_received = 0
        previous = None
        for op in phase.ops:
            if op.kind is Kind.SEND:
                chunk = (op.begin, op.end)
                if rank < block:
                    sends.append((rank, op.peer, (op.end - op.begin) / parts, chunk != previous, num_sent))
                num_sent, previous = num_sent + 1, chunk
            else:
                if op.peer < block:
                    receipts.setdefault((op.peer, rank), []).append((op.kind is Kind.ADD, num_received))
                num_received += 1
    received = [receipts[source, target].pop(0) for source, target, *_ in sends]
    rows = [send + receipt for send, receipt in zip(sends, received, strict=True)]
    columns = list(zip(*rows, strict=True)) if rows else [()] * 7
    kinds = (np.intp, np.intp, np.float64, bool, np.intp, bool, np.intp)
    return Round(repeat, *(np.array(column, kind) for column, kind in zip(columns, kinds, strict=True)))
