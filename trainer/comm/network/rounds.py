"""All ranks' rounds side by side, as arrays; of a world that repeats itself, those of one block of it.

Hosts alike, each with its ranks (and hosts that share a switch, where switches count), often do the same: the
ranks r and r + block then have the same schedule but for whom they meet, and their clocks show the same time
for ever. So one block is enough, if what leaves it is taken to come back into it. That this holds is looked
at, not taken for granted: at every rank that the block meets and some further ones; where it does not hold,
all ranks are laid side by side.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from trainer.comm.schedules.schedule import Kind, Phase, Schedule

_SAMPLES = 64  # ranks whose schedules are compared, beside those that the first block meets


class Family(Sequence[Schedule]):
    """The schedules of all ranks, each built when it is looked at first."""

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
    fresh: np.ndarray  # not a chunk that its sender has just put in place for another receiver
    send_turn: np.ndarray  # this message is the sender's n-th of the round
    adds: np.ndarray
    receive_turn: np.ndarray


def rounds(schedules: Sequence[Schedule], hosts: Sequence[int], together: int) -> tuple[int, list[Round]]:
    """The ranks of one block, and the rounds in which they send; targets may lie in other blocks.

    Args:
        hosts: index of the host of every rank.
        together: hosts that a block must not part: those of a switch.
    """
    places = np.asarray(hosts)
    block = int(np.count_nonzero(places < places[0] + together))
    if _repeats(places, block) and _alike(schedules, places // together, places, block):
        found = list(_rounds(schedules, block))
        if all(_closed(round_, block) for round_ in found):
            return block, found
    return len(schedules), list(_rounds(schedules, len(schedules)))


def _repeats(places: np.ndarray, block: int) -> bool:
    """Whether hosts are of one size, and numbered block after block."""
    if len(places) % block or len(places) == block:
        return False
    blocks = places.reshape(-1, block)
    shifted = np.arange(len(blocks))[:, None] * (blocks[0, -1] + 1)
    return blocks[0, 0] == 0 and bool((blocks == blocks[0] + shifted).all())


def _alike(schedules: Sequence[Schedule], switches: np.ndarray, hosts: np.ndarray, block: int) -> bool:
    def seen(rank: int) -> list[tuple[object, ...]]:
        """A schedule without names: a peer is its place in its block, and whether it is on another host."""
        schedule = schedules[rank]
        return [
            (phase.repeat, op.kind, op.end - op.begin, op.peer % block,
             hosts[op.peer] == hosts[rank], switches[op.peer] == switches[rank])
            for phase in (*schedule.reduce, *schedule.gather)
            for op in phase.ops
        ]  # fmt: skip

    step = max(1, len(schedules) // _SAMPLES - 1)  # seldom a multiple of anything in the world
    looked_at = {*_peers(schedules, range(block)), *range(len(schedules) - 1, -1, -step)}
    first = [seen(rank) for rank in range(block)]
    return all(seen(rank) == first[rank % block] for rank in looked_at)


def _peers(schedules: Sequence[Schedule], ranks: Sequence[int]) -> set[int]:
    return {peer for rank in ranks for peer in schedules[rank].peers(*Kind)}


def _closed(round_: Round, block: int) -> bool:
    """Whether each rank of the block receives, turn by turn, as much as comes back into the block."""
    arrivals = set(zip((round_.target % block).tolist(), round_.receive_turn.tolist(), strict=True))
    turns = np.bincount(round_.target % block, minlength=block)
    return len(arrivals) == len(round_.target) and all(turn < turns[rank] for rank, turn in arrivals)


def _rounds(schedules: Sequence[Schedule], block: int) -> Iterator[Round]:
    """Equal rounds in a row are given once, with their number."""
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
    """Join every send of the block with its receive; a pair's messages are received as they are sent."""
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
