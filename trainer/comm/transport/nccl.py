"""Runs schedules on GPU tensors with NCCL's point-to-point messages, on a stream beside the backward pass."""

import torch
import torch.distributed as dist
from torch.futures import Future

from trainer.comm.algorithms.program import Move, Visit, lay_out
from trainer.comm.algorithms.schedule import Kind, Schedule
from trainer.comm.leaf_sums import Message
from trainer.comm.timeline import BucketRecord, GpuClock
from trainer.comm.transport.bucket_layout import Layout, agree
from trainer.comm.transport.gloo import GlooLinks

_WIDTH = 1  # a sweep's messages are all in flight together, so one segment per stage keeps every link busy


class NcclReducer:
    """Runs one schedule on buckets by launching work on a side stream; nothing here waits for the GPU.

    A sweep's messages, of all segments in flight, are one NCCL group: links inside the host and between hosts
    are busy together. NCCL's watchdog finds a peer that is gone or silent, after the timeout of `group`.

    A bucket costs the host, on the thread that also launches the backward pass, a group for each round and
    segment. So by default a bucket is one segment.

    Args:
        group: an NCCL group of all ranks that has no other user.
        links: of the same ranks over gloo, to compare layouts.
        schedule: this rank's part.
        clock: of the GPU of the buckets.
        wire_dtype: as for `CpuExecutor`.
        segment_bytes: bytes sent at once; None: the whole bucket.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        links: GlooLinks,
        schedule: Schedule,
        clock: GpuClock,
        wire_dtype: torch.dtype | None,
        segment_bytes: int | None = None,
    ) -> None:
        self._group, self._schedule, self._clock = group, schedule, clock
        self._wire_dtype, self._segment_bytes = wire_dtype, segment_bytes
        self._stream = torch.cuda.Stream(clock.device)
        self._send_to, self._receive_from = schedule.peers(Kind.SEND), schedule.peers(Kind.ADD, Kind.COPY)
        neighbours = {*self._send_to, *self._receive_from}
        self._links = {peer: links.to(peer) for peer in neighbours}
        self._agreed: set[Layout] = set()
        self._programs: dict[tuple[int, int], list[list[Visit]]] = {}  # as in CpuExecutor
        # The first call on an NCCL group must come from all its ranks; a batch may involve only some.
        dist.all_reduce(torch.zeros(1, device=clock.device), group=group)

    def submit(
        self, bucket: dist.GradBucket | Message, record: BucketRecord, divisor: int = 1
    ) -> Future[torch.Tensor]:
        """Launch the all-reduce of `bucket` to its sum / `divisor`; the Future's value waits on streams.

        The side stream does what `CpuExecutor.run` does, after the work now on the current stream.

        Raises:
            PeerError, ValueError: as `CpuExecutor.run`, at the first bucket of a layout.
        """
        gradients = bucket.buffer()
        layout = Layout.of(gradients, self._wire_dtype)
        if layout not in self._agreed:
            agree(layout, self._receive_from, self._send_to, self._links)
            self._agreed.add(layout)
        future: Future[torch.Tensor] = Future(devices=[self._clock.device])
        ready = self._clock.mark()
        self._stream.wait_event(ready)
        gradients.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            start = self._clock.mark()
            self._collect(gradients, layout, divisor)
            record.read_gpu = self._clock.times(ready, start, self._clock.mark())
            future.set_result(gradients)  # records the current stream
        return future

    def _collect(self, bucket: torch.Tensor, layout: Layout, divisor: int) -> None:
        sums = bucket.to(layout.sum_dtype)
        if layout.wire == torch.float16 and divisor != 1:  # see CpuExecutor.run
            sums.div_(divisor)
            divisor = 1
        self._run(self._program(layout), sums, layout, divisor)
        if sums is not bucket:
            bucket.copy_(sums)

    def _program(self, layout: Layout) -> list[list[Visit]]:
        size = layout.numel, layout.wire.itemsize
        if size not in self._programs:
            segment_bytes = self._segment_bytes or max(1, layout.numel * layout.wire.itemsize)
            self._programs[size] = lay_out(self._schedule, *size, segment_bytes, _WIDTH)
        return self._programs[size]

    def _run(self, sweeps: list[list[Visit]], sums: torch.Tensor, layout: Layout, divisor: int) -> None:
        compressed = layout.wire != sums.dtype and bool(self._send_to)
        arrived: dict[Move, torch.Tensor] = {}
        for sweep, next_sweep in zip(sweeps, [*sweeps[1:], []], strict=True):
            for visit in sweep:
                for move in visit.receives:
                    if move in arrived:
                        move.take(sums, arrived.pop(move))
                if visit.owned:
                    owned = sums[slice(*visit.owned)]
                    if divisor != 1:
                        owned.div_(divisor)
                    if compressed:  # the owner keeps the rounded values, too
                        owned.copy_(owned.to(layout.wire))
            messages = []
            for move in (move for visit in sweep for move in visit.sends):
                chunk = move.chunk(sums).to(layout.wire)
                messages.append(dist.P2POp(dist.isend, chunk, group=self._group, group_peer=move.peer))
            for move in (move for visit in next_sweep for move in visit.receives):
                if move.kind is Kind.ADD or compressed:
                    target = arrived[move] = sums.new_empty(move.numel, dtype=layout.wire)
                else:
                    target = move.chunk(sums)
                messages.append(dist.P2POp(dist.irecv, target, group=self._group, group_peer=move.peer))
            if messages:
                for work in dist.batch_isend_irecv(messages):
                    work.wait()  # on the stream
