"""Runs schedules on CPU tensors: shared memory between the processes of a host, gloo between hosts.

Why no rank waits forever. All ranks process the buckets in one order and the visits of a bucket in one order,
at each visit first the receives, then the sends. A message sent at one visit is received at the next visit of
its segment. A rank at visit p waits only for
- a message, which its peer sent at a visit before p;
- room in its outbox or in a window (mailbox.py), which is free once some peer has received an older message.
  Both have room for all messages that are received after p, because only `IN_FLIGHT` segments are in flight
  and each has the messages of one round out; so the one waited for is received at p or before.
A rank that waits for a receive of visit p is past its own receives of p, at its sends. So each wait is for
something earlier in that order, and waits cannot form a cycle, at any number of ranks, buckets and segments.
gloo, between hosts, queues sends in the sender's memory and adds no other wait. The room does not grow with
the world: `IN_FLIGHT` packets per socket, and as many chunks (or, if a round sends each peer another part, a
few segments split into parts) in the outbox.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist

from trainer.comm.algorithms.pipeline import SEGMENT_MB, WIDTH
from trainer.comm.algorithms.program import Visit, chunks_in_flight, lay_out, messages_in_flight
from trainer.comm.algorithms.schedule import Kind, Schedule
from trainer.comm.transport.bucket_layout import Layout, agree
from trainer.comm.transport.gloo import SENT, GlooLink, GlooLinks
from trainer.comm.transport.inbox import Inbox
from trainer.comm.transport.mailbox import Outbox, Slot, open_mailboxes


class CpuExecutor:
    """Runs one schedule on buckets of all ranks, one at a time and in the same order on every rank.

    Args:
        links: to the other ranks.
        schedule: this rank's part.
        hosts: host index of every rank; ranks on one host exchange data through shared memory.
        wire_dtype: the dtype of chunks as sent; None: the dtype of the bucket.
        segment_bytes, width: see `trainer.comm.algorithms.pipeline`.
    """

    def __init__(
        self,
        links: GlooLinks,
        schedule: Schedule,
        hosts: Sequence[int],
        wire_dtype: torch.dtype | None = None,
        segment_bytes: int = int(SEGMENT_MB * 2**20),
        width: int = WIDTH,
    ) -> None:
        self.rank = links.rank
        self._schedule, self._wire_dtype = schedule, wire_dtype
        self._segment_bytes, self._width = segment_bytes, width
        self._send_to = schedule.peers(Kind.SEND)
        self._receive_from = schedule.peers(Kind.ADD, Kind.COPY)
        self._links = {peer: links.to(peer) for peer in {*self._send_to, *self._receive_from}}
        # Uncompressed chunks for other hosts are sent from the bucket itself; all others from the outbox.
        self._outbox = Outbox(
            num_slots=chunks_in_flight(schedule, width),
            slot_bytes=segment_bytes * schedule.widest // schedule.parts
            + (1 + schedule.widest) * torch.float64.itemsize,
        )

        def here(peers: Sequence[int]) -> list[int]:
            return [peer for peer in peers if hosts[peer] == hosts[self.rank]]

        self._mailboxes = open_mailboxes(
            self.rank,
            here(self._send_to),
            here(self._receive_from),
            self._outbox,
            messages_in_flight(schedule),
            links.exchange,
            links.timeout_s,
        )
        self._outbox.forget_file()
        self._inbox = Inbox({peer: link for peer, link in self._links.items() if peer not in self._mailboxes})
        self._agreed: set[Layout] = set()
        self._programs: dict[tuple[int, int], list[Visit]] = {}  # by elements, and bytes as sent
        self._wide = torch.empty(0, dtype=torch.float32)  # sums of half precision buckets

    def run(self, bucket: torch.Tensor, divisor: int = 1) -> None:
        """Give every rank the sum of all `bucket`s / `divisor`, with the same bits.

        The owner of each part divides its sum, in the dtype of the sum, before it sends it; if sums are sent
        as fp16, every rank divides its own values first.

        Args:
            bucket: (numel,) contiguous, on the CPU; fp32, fp64, int64, or fp16 or bf16, which are summed in
                fp32.
            divisor: of the sums.

        Raises:
            PeerError: a neighbour is gone, silent for `links.timeout_s`, or has a bucket of another layout.
            ValueError: a dtype that cannot be averaged.
        """
        layout = Layout.of(bucket, self._wire_dtype)
        if layout not in self._agreed:
            agree(layout, self._receive_from, self._send_to, self._links)
            self._agreed.add(layout)
        sums = bucket
        if layout.sum_dtype != bucket.dtype:
            if self._wide.numel() < layout.numel:
                self._wide = torch.empty(layout.numel, dtype=layout.sum_dtype)
            sums = self._wide[: bucket.numel()].copy_(bucket)
        if layout.wire == torch.float16 and divisor != 1:  # a sum may exceed its largest number, 65504
            sums.div_(divisor)
            divisor = 1
        self._run(self._program(layout), sums, layout, divisor)
        if sums is not bucket:
            bucket.copy_(sums)

    def close(self) -> None:
        """Disconnect from the peers of this host after they have read everything: unread ones are lost."""
        self._outbox.drain()
        for mailbox in self._mailboxes.values():
            mailbox.close()

    def _program(self, layout: Layout) -> list[Visit]:
        size = layout.numel, layout.wire.itemsize
        if size not in self._programs:
            sweeps = lay_out(self._schedule, *size, self._segment_bytes, self._width)
            visits = chain(*sweeps)
            self._programs[size] = [visit for visit in visits if visit.receives or visit.owned or visit.sends]
        return self._programs[size]

    def _run(self, program: list[Visit], sums: torch.Tensor, layout: Layout, divisor: int) -> None:
        compressed = layout.wire != sums.dtype and bool(self._send_to)
        in_flight: list[tuple[GlooLink, dist.Work]] = []  # sends that still read `sums` itself
        arrivals = self._inbox.open(program, sums, layout)
        for visit in program:
            for move in visit.receives:
                if move.peer in self._mailboxes:
                    mailbox = self._mailboxes[move.peer]
                    message = mailbox.receive(move.numel * layout.wire.itemsize, layout.tag)
                    move.take(sums, message.view(layout.wire))
                    mailbox.release()
                elif (received := arrivals.take(move)) is not None:
                    move.take(sums, received)
            # One copy serves several receivers.
            copies: dict[tuple[int, int], tuple[Slot, torch.Tensor]] = {}
            if visit.owned:
                owned = sums[slice(*visit.owned)]
                if divisor != 1:
                    owned.div_(divisor)
                if compressed:  # the owner keeps the rounded values, too
                    copies[visit.owned] = self._outbox.put(owned, layout.wire)
                    owned.copy_(copies[visit.owned][1])
            for move in visit.sends:
                link = self._links[move.peer]
                if move.peer not in self._mailboxes and not compressed:
                    in_flight.append((link, link.send(move.chunk(sums), layout.tag)))
                    continue
                if (elements := (move.begin, move.end)) not in copies:
                    copies[elements] = self._outbox.put(move.chunk(sums), layout.wire)
                slot, copy = copies[elements]
                if move.peer in self._mailboxes:
                    self._mailboxes[move.peer].send(slot, copy.nbytes, layout.tag)
                else:
                    slot.readers.append(partial(link.wait, link.send(copy, layout.tag), SENT))
        for link, work in in_flight:
            link.wait(work, SENT)
