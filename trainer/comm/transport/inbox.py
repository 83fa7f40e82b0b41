"""Receives from other hosts, posted ahead.

gloo sends only after the receiver's request. The request queues behind the data that flows in the same
direction, so a receive posted late leaves the link idle.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from trainer.comm.algorithms.all_reduce import Kind
from trainer.comm.algorithms.program import Move, Visit
from trainer.comm.transport.bucket_layout import Layout
from trainer.comm.transport.gloo import RECEIVED, GlooLink

_MAX_BYTES = 16 << 20  # of sums that have arrived before this rank processes them


class Inbox:
    """Memory, kept between buckets, for messages from other hosts that cannot be received in the bucket."""

    def __init__(self, links: dict[int, GlooLink]) -> None:
        self.links = links
        self._memory = torch.empty(0, dtype=torch.uint8)

    def open(self, program: Sequence[Visit], sums: torch.Tensor, layout: Layout) -> "BucketReceives":
        """Begin to receive the messages of `program` from other hosts."""
        moves = [move for visit in program for move in visit.receives if move.peer in self.links]
        staged = [move.numel for move in moves if not _goes_straight(move, layout)]
        slot_bytes = -(-max(staged, default=0) * layout.wire.itemsize // 64) * 64
        num_slots = min(len(staged), max(1, _MAX_BYTES // max(1, slot_bytes)))
        if self._memory.numel() < num_slots * slot_bytes:
            self._memory = torch.empty(num_slots * slot_bytes, dtype=torch.uint8)
        memory = self._memory[: num_slots * slot_bytes].view(layout.wire)
        slots = deque(memory.chunk(num_slots)) if num_slots else deque()
        return BucketReceives(self.links, iter(moves), sums, layout, slots)


class BucketReceives:
    """The receives of one bucket from other hosts, in the order of its program."""

    def __init__(
        self,
        links: dict[int, GlooLink],
        moves: Iterator[Move],
        sums: torch.Tensor,
        layout: Layout,
        free: deque[torch.Tensor],
    ) -> None:
        self._links, self._moves, self._sums, self._layout, self._free = links, moves, sums, layout, free
        self._next = next(moves, None)
        self._posted: deque[tuple[dist.Work, torch.Tensor | None]] = deque()
        self._post()

    def take(self, move: Move) -> torch.Tensor | None:
        """Wait for the oldest receive, which is `move`; return the message, or None if it is in the bucket.

        The tensor is valid until the next call of `take`.
        """
        self._post()
        work, slot = self._posted.popleft()
        self._links[move.peer].wait(work, RECEIVED)
        if slot is None:
            return None
        self._free.append(slot)
        return slot[: move.numel]

    def _post(self) -> None:
        """Post as many receives as there is room for."""
        while (move := self._next) is not None:
            slot = None
            if _goes_straight(move, self._layout):
                target = move.chunk(self._sums)
            elif self._free:
                slot = self._free.popleft()
                target = slot[: move.numel]
            else:
                return
            self._posted.append((self._links[move.peer].receive(target, self._layout.tag), slot))
            self._next = next(self._moves, None)


def _goes_straight(move: Move, layout: Layout) -> bool:
    """Whether a message can be received in the bucket itself.

    It may arrive long before its visit: a finished sum contains what this rank has sent of the
    same elements, so it can arrive only when they are no longer needed here; and a gathered block
    comes once.
    """
    return move.kind is Kind.COPY and layout.wire == layout.sum_dtype
