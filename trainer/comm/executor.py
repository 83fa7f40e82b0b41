"""Runs a schedule on tensors: by gloo on CPUs and by NCCL on GPUs, through the same calls.

Messages are P2POps of `batch_isend_irecv`. On a GPU its waits are the current stream's, so everything here is
queued and the host goes on. On CPUs the calling thread waits.

Why no rank waits forever. All ranks process the buckets in one order and the visits of a bucket in one order,
at each visit first the receives, then the sends. A message sent at one visit is received at the next visit of
its segment, and a rank waits for nothing but such messages, sent at an earlier visit. So each wait is for
something earlier in that order, and waits cannot form a cycle, at any number of ranks, buckets and segments.
Shared memory adds two waits: see shared_memory.py.

Two conventions keep messages apart. A group has one user, and the messages of a pair of ranks arrive in the
order in which they were sent. A chunk is sent from the bucket itself and a finished sum is received in it,
because of a rule of schedules: a rank adds nothing to what it has sent, so only the finished sum, which
contains the message, overwrites it.
"""

from collections import deque
from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from trainer import accelerator
from trainer.comm.algorithms.pipeline import SEGMENT_MB, WIDTH
from trainer.comm.algorithms.program import Move, Visit, lay_out
from trainer.comm.algorithms.schedule import Kind, Schedule
from trainer.comm.shared_memory import SharedMemory

SUMMED_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)
_HALF = (torch.float16, torch.bfloat16)
_AHEAD_BYTES = 16 << 20  # of sums that may arrive before this rank adds them
Posted = tuple[list[dist.Work], dict[Move, Tensor], list[dist.P2POp]]  # waits, receives to add, all messages


class Executor:
    """Runs one schedule on buckets of all ranks, one at a time and in the same order on every rank.

    gloo asks for a message only once its receive is posted, and the request queues behind data that flows in
    the same direction. So on CPUs receives are posted some visits ahead, each visit by itself. On a GPU the
    messages of a sweep, of all segments in flight, are one NCCL group: links inside the host and between
    hosts are busy together. A group costs a launch, so by default a bucket is one segment there.

    Args:
        group: of all ranks of the schedule, for tensors on `device`, without another user.
        schedule: this rank's part.
        device: of the buckets.
        wire_dtype: the dtype of chunks as sent; None: the dtype of the bucket. Half precision and integers
            are sent as they are.
        segment_mb: MiB per segment; None: 2 on a CPU, a whole bucket on a GPU.
        width: segments that enter with each sweep; None: 2 on a CPU, 1 on a GPU.
        hosts: host index of every rank; on CPUs, ranks of one host then share memory. None: all are apart.
        timeout_s: the longest wait for a peer on this host.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        schedule: Schedule,
        device: torch.device,
        wire_dtype: torch.dtype | None = None,
        segment_mb: float | None = None,
        width: int | None = None,
        hosts: Sequence[int] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._group, self._schedule, self._wire_dtype = group, schedule, wire_dtype
        self._by_visit = not accelerator.is_accelerator(device)
        self._segment_mb = segment_mb or (SEGMENT_MB if self._by_visit else None)
        self._width = width or (WIDTH if self._by_visit else 1)
        self._sends = bool(schedule.peers(Kind.SEND))
        self._shared: SharedMemory | None = None
        if self._by_visit and hosts is not None:
            segment_bytes = int((segment_mb or SEGMENT_MB) * 2**20)
            self._shared = SharedMemory(group, schedule, hosts, segment_bytes, self._width, timeout_s)
        self._near = set[int]() if self._shared is None else self._shared.peers
        self._programs: dict[tuple[int, int], tuple[list[list[Visit]], int]] = {}
        # The first call on an NCCL group must come from all its ranks; a batch may involve only some.
        dist.all_reduce(torch.zeros(1, device=device), group=group)

    def run(self, bucket: Tensor, divisor: int = 1) -> None:
        """Give every rank the sum of all `bucket`s / `divisor`, with the same bits.

        The owner of each part divides its sum, in the dtype of the sum, before it sends it; if sums are sent
        as fp16, every rank divides its own values first.

        Args:
            bucket: (numel,) contiguous; fp32, fp64, int64, or fp16 or bf16, which are summed in fp32.
            divisor: of the sums.

        Raises:
            ValueError: a dtype that cannot be averaged.
            RuntimeError: a peer is gone, or silent for the timeout of `group`.
        """
        if bucket.dtype not in SUMMED_DTYPES:
            raise ValueError(
                f"no all-reduce of {bucket.dtype}: gradients must be fp32, fp64, fp16, bf16 or int64"
            )
        own_wire = bucket.dtype in (*_HALF, torch.int64)
        wire = bucket.dtype if own_wire or self._wire_dtype is None else self._wire_dtype
        sums = bucket.float() if bucket.dtype in _HALF else bucket
        if wire == torch.float16 and divisor != 1:  # a sum may exceed its largest number, 65504
            sums.div_(divisor)
            divisor = 1
        self._run(sums, wire, divisor)
        if sums is not bucket:
            bucket.copy_(sums)

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()

    def _program(self, numel: int, itemsize: int) -> tuple[list[list[Visit]], int]:
        """The visits, in steps whose messages start together; how many steps ahead receives are posted."""
        if (numel, itemsize) not in self._programs:
            size = max(1, numel * itemsize)
            segment_bytes = size if self._segment_mb is None else int(self._segment_mb * 2**20)
            steps = lay_out(self._schedule, numel, itemsize, segment_bytes, self._width)
            ahead = 0
            if self._by_visit:
                visits = chain(*steps)
                steps = [[visit] for visit in visits if visit.receives or visit.owned or visit.sends]
                moves = [[m for visit in step for m in self._remote(visit.receives)] for step in steps]
                most = itemsize * max((sum(move.numel for move in step) for step in moves), default=0)
                ahead = min(len(steps), max(1, _AHEAD_BYTES // most)) if most else 0
            self._programs[numel, itemsize] = steps, ahead
        return self._programs[numel, itemsize]

    def _remote(self, moves: Sequence[Move]) -> Sequence[Move]:
        return [move for move in moves if move.peer not in self._near]

    def _run(self, sums: Tensor, wire: torch.dtype, divisor: int) -> None:
        steps, ahead = self._program(sums.numel(), wire.itemsize)
        compressed = wire != sums.dtype and self._sends
        posted: deque[Posted] = deque()
        sending: list[dist.Work] = []

        def post(sends: list[tuple[Tensor, int]], index: int) -> None:
            """Start `sends`, and the receives of the step of this index."""
            messages = [
                dist.P2POp(dist.isend, chunk, group=self._group, group_peer=peer) for chunk, peer in sends
            ]
            arriving: dict[Move, Tensor] = {}
            step = steps[index] if index < len(steps) else []
            for move in (move for visit in step for move in self._remote(visit.receives)):
                straight = move.kind is Kind.COPY and not compressed
                target = move.chunk(sums) if straight else sums.new_empty(move.numel, dtype=wire)
                if not straight:
                    arriving[move] = target
                messages.append(dist.P2POp(dist.irecv, target, group=self._group, group_peer=move.peer))
            works = dist.batch_isend_irecv(messages) if messages else []
            # gloo has a work for each message; NCCL has one for all, which its stream waits for.
            num_sending = len(sends) if self._by_visit else 0
            sending.extend(works[:num_sending])
            posted.append((works[num_sending:], arriving, messages))

        for index in range(ahead + 1):
            post([], index)
        for index, step in enumerate(steps):
            works, arrived, messages = posted.popleft()
            for work in works:
                work.wait()
            del messages  # until here it has kept their tensors alive
            sends: list[tuple[Tensor, int]] = []
            for visit in step:
                self._receive(visit, sums, wire, arrived)
                if visit.owned:
                    owned = sums[slice(*visit.owned)]
                    if divisor != 1:
                        owned.div_(divisor)
                    if compressed:  # the owner keeps the rounded values, too
                        owned.copy_(owned.to(wire))
                remote = self._remote(visit.sends)
                sends += [(move.chunk(sums).to(wire), move.peer) for move in remote]
                if self._shared is not None:
                    self._shared.send([move for move in visit.sends if move.peer in self._near], sums, wire)
            post(sends, index + 1 + ahead)
        for work in sending:
            work.wait()

    def _receive(self, visit: Visit, sums: Tensor, wire: torch.dtype, arrived: dict[Move, Tensor]) -> None:
        for move in visit.receives:
            if self._shared is not None and move.peer in self._near:
                self._shared.receive(move, sums, wire)
            elif move in arrived:
                move.take(sums, arrived.pop(move))
