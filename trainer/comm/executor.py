"""Run a schedule on tensors, with gloo on CPUs and NCCL on GPUs, through the same calls.

Segments, visits and sweeps are those of algorithms/pipeline.py. Messages are P2POps of `batch_isend_irecv`.
On a GPU, only the current stream waits for them, so everything is queued and the CPU continues. On CPUs, the
calling thread waits.

There are no deadlocks. All ranks process the buckets in the same order and the visits of a bucket in the same
order. At each visit, they post the receives first, and then the sends. A message that is sent at one visit is
received at the next visit of its segment, and a rank waits only for such messages, sent at an earlier visit.
So each wait is for something earlier in that order, and waits cannot form a cycle, for any number of ranks,
buckets and segments. Shared memory adds two waits; see shared_memory.py.

Messages are not mixed up, because a group has only one user, and messages between two ranks arrive in the
order in which they were sent. Chunks are sent from the bucket, and finished sums are received into it,
without a copy. This is safe because a rank adds nothing to a chunk that it has sent: only the finished sum,
which contains that message, overwrites it.
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
_AHEAD_BYTES = 16 << 20  # the most data that may arrive before this rank adds it
Posted = tuple[list[dist.Work], dict[Move, Tensor], list[dist.P2POp]]  # waits, receives to add, all messages


class Executor:
    """Runs one schedule on buckets, one at a time and in the same order on every rank.

    gloo requests a message only after its receive was posted, and the request queues behind data that flows
    in the same direction. Therefore, on CPUs, receives are posted some visits ahead, for each visit
    separately. On a GPU, all messages of a sweep are one NCCL group, so that links inside a host and between
    hosts are busy at the same time. Each group costs a launch, so by default a bucket is one segment there.

    Args:
        group: contains all ranks of the schedule, supports tensors on `device`, and has no other user.
        wire_dtype: the dtype in which chunks are sent; None: the dtype of the bucket. Half-precision and
            integer buckets are always sent in their own dtype.
        segment_mb: MiB per segment; None: 2 on a CPU, a whole bucket on a GPU.
        width: the number of segments that enter with each sweep; None: 2 on a CPU, 1 on a GPU.
        hosts: host index of every rank, by which ranks on CPUs share memory; None: no shared memory.
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
        self._local_peers = set[int]() if self._shared is None else self._shared.peers
        self._programs: dict[tuple[int, int], tuple[list[list[Visit]], int]] = {}
        # The first call on an NCCL group must come from all its ranks; a batch may involve only some.
        dist.all_reduce(torch.zeros(1, device=device), group=group)

    def run(self, bucket: Tensor, divisor: int = 1) -> None:
        """Replace `bucket` with the sum over ranks divided by `divisor`, with the same bits on every rank.

        The owner of each part divides its sum before sending it. If sums are sent as fp16, every rank divides
        its own values instead, before they are added.

        Args:
            bucket: (numel,), contiguous; fp32, fp64 or int64; or fp16 or bf16, which are added in fp32.

        Raises:
            ValueError: the dtype is not supported.
            RuntimeError: a peer has died, or did not answer within the timeout of `group`.
        """
        if bucket.dtype not in SUMMED_DTYPES:
            raise ValueError(
                f"all-reduce does not support {bucket.dtype}; use fp32, fp64, fp16, bf16 or int64 gradients"
            )
        own_wire = bucket.dtype in (*_HALF, torch.int64)
        wire = bucket.dtype if own_wire or self._wire_dtype is None else self._wire_dtype
        sums = bucket.float() if bucket.dtype in _HALF else bucket
        if wire == torch.float16 and divisor != 1:  # a sum may exceed the largest fp16 number, 65504
            sums.div_(divisor)
            divisor = 1
        self._run(sums, wire, divisor)
        if sums is not bucket:
            bucket.copy_(sums)

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()

    def _program(self, numel: int, itemsize: int) -> tuple[list[list[Visit]], int]:
        """Return steps (visits whose messages start together), and how many steps ahead to post receives."""
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
        return [move for move in moves if move.peer not in self._local_peers]

    def _run(self, sums: Tensor, wire: torch.dtype, divisor: int) -> None:
        steps, ahead = self._program(sums.numel(), wire.itemsize)
        compressed = wire != sums.dtype and self._sends
        posted: deque[Posted] = deque()
        sending: list[dist.Work] = []

        def post(sends: list[tuple[Tensor, int]], index: int) -> None:
            """Start `sends` and the receives of step `index`."""
            messages = [
                dist.P2POp(dist.isend, chunk, group=self._group, group_peer=peer) for chunk, peer in sends
            ]
            arriving: dict[Move, Tensor] = {}
            step = steps[index] if index < len(steps) else []
            for move in (move for visit in step for move in self._remote(visit.receives)):
                in_place = move.kind is Kind.COPY and not compressed
                target = move.chunk(sums) if in_place else sums.new_empty(move.numel, dtype=wire)
                if not in_place:
                    arriving[move] = target
                messages.append(dist.P2POp(dist.irecv, target, group=self._group, group_peer=move.peer))
            works = dist.batch_isend_irecv(messages) if messages else []
            # gloo returns a Work for each message; NCCL returns one for all, for which the stream waits.
            num_sending = len(sends) if self._by_visit else 0
            sending.extend(works[:num_sending])
            posted.append((works[num_sending:], arriving, messages))

        for index in range(ahead + 1):
            post([], index)
        for index, step in enumerate(steps):
            works, arrived, messages = posted.popleft()
            for work in works:
                work.wait()
            del messages  # which kept the tensors alive until now
            sends: list[tuple[Tensor, int]] = []
            for visit in step:
                self._receive(visit, sums, wire, arrived)
                if visit.owned:
                    owned = sums[slice(*visit.owned)]
                    if divisor != 1:
                        owned.div_(divisor)
                    if compressed:  # round the owner's copy as well
                        owned.copy_(owned.to(wire))
                remote = self._remote(visit.sends)
                sends += [(move.chunk(sums).to(wire), move.peer) for move in remote]
                if self._shared is not None:
                    self._shared.send([m for m in visit.sends if m.peer in self._local_peers], sums, wire)
            post(sends, index + 1 + ahead)
        for work in sending:
            work.wait()

    def _receive(self, visit: Visit, sums: Tensor, wire: torch.dtype, arrived: dict[Move, Tensor]) -> None:
        for move in visit.receives:
            if self._shared is not None and move.peer in self._local_peers:
                self._shared.receive(move, sums, wire)
            elif move in arrived:
                move.take(sums, arrived.pop(move))
