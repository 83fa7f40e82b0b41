"""Run schedules on CPU tensors: shared memory between the processes of a host, gloo between hosts.

Why no rank waits for ever. All ranks take the buckets in one order and the visits of a bucket in one order,
at each visit first the receives, then the sends. A message sent at one visit is received at the next visit of
its segment. A rank at visit p waits only for
- a message, which its peer sent at a visit before p;
- room in its outbox or in a window (mailbox.py), which comes when some peer has received an older message.
  Both have room for all messages that are received after p, because only `IN_FLIGHT` segments are on their
  way and each has the messages of one round out; so the one waited for is received at p or before.
Whoever waits for a receive of visit p is itself at the sends of p, past its receives. So each wait is for
something earlier in that order, and no circle of waits can close, at any number of ranks, buckets and
segments. gloo, between hosts, queues sends in the memory of their sender and adds no other wait.
The room itself grows with no world: `IN_FLIGHT` packets a socket, and as many chunks (or, where a round sends
each peer another part, a few segments cut into parts) in the outbox.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist

from trainer.comm.execution.gloo import SENT, GlooLink
from trainer.comm.execution.inbox import Inbox
from trainer.comm.execution.layout import Layout, agree
from trainer.comm.execution.mailbox import Mailbox, Outbox, Slot, open_mailboxes
from trainer.comm.schedules.algorithms import Kind, Schedule
from trainer.comm.schedules.pipeline import SEGMENT_MB, WIDTH
from trainer.comm.schedules.program import Move, Visit, chunks_in_flight, lay_out, messages_in_flight


class CpuExecutor:
    """All-reduces buckets of a process group, one at a time and in the same order on every rank.

    Args:
        group: a gloo group of all ranks that nobody else uses meanwhile.
        schedule: this rank's part.
        hosts: host index of every rank; ranks that share one exchange data through shared memory.
        wire_dtype: what sums travel as; None sends them in the dtype of the bucket.
        segment_bytes, width: see `trainer.comm.schedules.pipeline`.
        timeout_s: the longest that one neighbour may keep this rank waiting.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        schedule: Schedule,
        hosts: Sequence[int],
        wire_dtype: torch.dtype | None = None,
        segment_bytes: int = int(SEGMENT_MB * 2**20),
        width: int = WIDTH,
        timeout_s: float = 600.0,
    ) -> None:
        self.rank = dist.get_rank(group)
        self._schedule, self._wire_dtype = schedule, wire_dtype
        self._segment_bytes, self._width = segment_bytes, width
        self._send_to = schedule.peers(Kind.SEND)
        self._receive_from = schedule.peers(Kind.ADD, Kind.COPY)
        self._links = {
            peer: GlooLink(group, peer, timeout_s) for peer in {*self._send_to, *self._receive_from}
        }
        # Uncompressed chunks for other hosts go straight from the bucket; all others from the outbox.
        self._outbox = Outbox(
            num_slots=chunks_in_flight(schedule, width),
            slot_bytes=segment_bytes * schedule.widest // schedule.parts + 2 * torch.float64.itemsize,
        )

        def here(peers: Sequence[int]) -> list[int]:
            return [peer for peer in peers if hosts[peer] == hosts[self.rank]]

        def exchange(text: str) -> list[str]:
            texts = [""] * len(hosts)
            dist.all_gather_object(texts, text, group=group)
            return texts

        self._mailboxes = open_mailboxes(
            self.rank,
            here(self._send_to),
            here(self._receive_from),
            self._outbox,
            messages_in_flight(schedule),
            exchange,
            timeout_s,
        )
        self._outbox.forget_file()
        self._inbox = Inbox({peer: link for peer, link in self._links.items() if peer not in self._mailboxes})
        self._programs: dict[Layout, list[Visit]] = {}
        self._wide = torch.empty(0, dtype=torch.float32)  # sums of half precision buckets

    def all_reduce(self, bucket: torch.Tensor, divisor: int = 1) -> dict[int, float]:
        """Replace `bucket` by its sum over all ranks divided by `divisor`, the same bits on every rank.

        The owner of each part divides it, in the dtype of the sum, before it sends it on; where sums travel
        as fp16, every rank divides its own values first.

        Args:
            bucket: (numel,) contiguous, on the CPU; fp32, fp64, or fp16 or bf16, which are summed in fp32.

        Returns:
            The seconds waited for each neighbour.

        Raises:
            PeerError: a neighbour is gone, silent for `timeout_s`, or has a bucket of another layout.
            ValueError: a dtype that cannot be averaged.
        """
        layout = Layout.of(bucket, self._wire_dtype)
        links: dict[int, Mailbox | GlooLink] = {**self._links, **self._mailboxes}
        for link in links.values():
            link.waited_s = 0.0
        if layout not in self._programs:
            agree(layout, self._receive_from, self._send_to, self._links)
            self._programs[layout] = self._lay_out(layout)
        sums = bucket
        if layout.sum_dtype != bucket.dtype:
            sums = self._wide[: bucket.numel()].copy_(bucket)
        if layout.wire == torch.float16:  # its largest number is 65504: a sum on its way could pass it
            sums.div_(divisor)
            divisor = 1
        self._run(self._programs[layout], sums, layout, divisor)
        if sums is not bucket:
            bucket.copy_(sums)
        return {peer: link.waited_s for peer, link in links.items()}

    def close(self) -> None:
        """Hang up on the peers of this host, once they have read everything: what is left unread is lost."""
        self._outbox.drain()
        for mailbox in self._mailboxes.values():
            mailbox.close()

    def _lay_out(self, layout: Layout) -> list[Visit]:
        if layout.sum_dtype != layout.dtype and layout.numel > self._wide.numel():
            self._wide = torch.empty(layout.numel, dtype=layout.sum_dtype)
        sweeps = lay_out(self._schedule, layout.numel, layout.wire.itemsize, self._segment_bytes, self._width)
        return [visit for visit in chain(*sweeps) if visit.receives or visit.owned or visit.sends]

    def _run(self, program: list[Visit], sums: torch.Tensor, layout: Layout, divisor: int) -> None:
        compressed = layout.wire != sums.dtype and bool(self._send_to)
        in_flight: list[tuple[GlooLink, dist.Work]] = []  # sends that still read `sums` itself
        arrivals = self._inbox.open(program, sums, layout)
        for visit in program:
            for move in visit.receives:
                if move.peer in self._mailboxes:
                    mailbox = self._mailboxes[move.peer]
                    message = mailbox.receive((move.end - move.begin) * layout.wire.itemsize, layout.tag)
                    _take(move, sums, message.view(layout.wire))
                    mailbox.release()
                elif (received := arrivals.take(move)) is not None:
                    _take(move, sums, received)
            copies: dict[tuple[int, int], tuple[Slot, torch.Tensor]] = {}  # one serves several receivers
            if visit.owned:
                owned = sums[slice(*visit.owned)].div_(divisor)
                if compressed:  # the owner keeps what the others will get
                    copies[visit.owned] = self._outbox.put(owned, layout.wire)
                    owned.copy_(copies[visit.owned][1])
            for move in visit.sends:
                link = self._links[move.peer]
                chunk, bounds = sums[move.begin : move.end], (move.begin, move.end)
                if move.peer not in self._mailboxes and not compressed:
                    in_flight.append((link, link.send(chunk, layout.tag)))
                    continue
                if bounds not in copies:
                    copies[bounds] = self._outbox.put(chunk, layout.wire)
                slot, copy = copies[bounds]
                if move.peer in self._mailboxes:
                    self._mailboxes[move.peer].send(slot, copy.nbytes, layout.tag)
                else:
                    slot.readers.append(partial(link.wait, link.send(copy, layout.tag), SENT))
        for link, work in in_flight:
            link.wait(work, SENT)


def _take(move: Move, sums: torch.Tensor, received: torch.Tensor) -> None:
    chunk = sums[move.begin : move.end]
    if move.kind is Kind.ADD:
        chunk.add_(received)
    else:
        chunk.copy_(received)
