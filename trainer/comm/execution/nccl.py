"""Run schedules on GPU tensors with NCCL's point-to-point messages, on a stream beside the backward pass."""

import torch
import torch.distributed as dist
from torch.futures import Future

from trainer.comm.execution.gloo import GlooLink
from trainer.comm.execution.layout import Layout, agree
from trainer.comm.schedules.algorithms import Kind, Schedule
from trainer.comm.schedules.program import Move, Visit, lay_out
from trainer.comm.timeline.gpu_clock import GpuClock
from trainer.comm.timeline.records import BucketRecord

_WIDTH = 1  # a sweep's messages are all in flight together, so one segment per stage fills every link


class NcclReducer:
    """All-reduces buckets by launching work on a side stream; nothing here waits for the GPU.

    A sweep's messages, those of all segments in flight, are one NCCL group: links inside the host and between
    hosts are busy together. A peer that is gone or silent is NCCL's watchdog's to find, after the timeout of
    `group`.

    Args:
        group: an NCCL group of all ranks that nobody else uses.
        cpu_group: a gloo group of the same ranks, to compare layouts on.
        schedule: this rank's part.
        clock: of the GPU on which the buckets are.
        wire_dtype, segment_bytes, timeout_s: as for `CpuExecutor`.
        divisor: what the sums are divided by.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        cpu_group: dist.ProcessGroup,
        schedule: Schedule,
        clock: GpuClock,
        wire_dtype: torch.dtype | None,
        segment_bytes: int,
        timeout_s: float,
        divisor: int,
    ) -> None:
        self._group, self._schedule, self._clock, self._device = group, schedule, clock, clock.device
        self._wire_dtype, self._segment_bytes = wire_dtype, segment_bytes
        self._divisor = divisor
        self._stream = torch.cuda.Stream(clock.device)
        self._send_to, self._receive_from = schedule.peers(Kind.SEND), schedule.peers(Kind.ADD, Kind.COPY)
        neighbours = {*self._send_to, *self._receive_from}
        self._links = {peer: GlooLink(cpu_group, peer, timeout_s) for peer in neighbours}
        self._programs: dict[Layout, list[list[Visit]]] = {}
        # The first call on an NCCL group must come from all its ranks; a batch may concern only some.
        dist.all_reduce(torch.zeros(1, device=clock.device), group=group)

    def submit(self, bucket: dist.GradBucket, record: BucketRecord) -> Future[torch.Tensor]:
        """Launch the all-reduce of `bucket`, to its mean over all ranks; streams wait for the Future's value.

        Raises:
            PeerError, ValueError: as `CpuExecutor.all_reduce`, at the first bucket of a layout.
        """
        gradients = bucket.buffer()
        layout = Layout.of(gradients, self._wire_dtype)
        if layout not in self._programs:
            agree(layout, self._receive_from, self._send_to, self._links)
            itemsize = layout.wire.itemsize
            self._programs[layout] = lay_out(
                self._schedule, layout.numel, itemsize, self._segment_bytes, _WIDTH
            )
        ready = self._clock.mark()
        self._stream.wait_event(ready)
        gradients.record_stream(self._stream)
        future: Future[torch.Tensor] = Future(devices=[self._device])
        with torch.cuda.stream(self._stream):
            start = self._clock.mark()
            sums = gradients.to(layout.sum_dtype)
            divisor = self._divisor
            if layout.wire == torch.float16:  # see CpuExecutor.all_reduce
                sums.div_(divisor)
                divisor = 1
            self._run(self._programs[layout], sums, layout, divisor)
            if sums is not gradients:
                gradients.copy_(sums)
            record.read_gpu = self._clock.times(ready, start, self._clock.mark())
            future.set_result(gradients)  # takes note of the current stream
        return future

    def _run(self, sweeps: list[list[Visit]], sums: torch.Tensor, layout: Layout, divisor: int) -> None:
        compressed = layout.wire != sums.dtype and bool(self._send_to)
        arrived: dict[Move, torch.Tensor] = {}
        for sweep, next_sweep in zip(sweeps, [*sweeps[1:], []], strict=True):
            for visit in sweep:
                for move in visit.receives:
                    chunk = sums[move.begin : move.end]
                    if move.kind is Kind.ADD:
                        chunk.add_(arrived.pop(move))
                    elif compressed:
                        chunk.copy_(arrived.pop(move))
                if visit.owned:
                    owned = sums[slice(*visit.owned)].div_(divisor)
                    if compressed:  # the owner keeps what the others will get
                        owned.copy_(owned.to(layout.wire))
            messages = []
            for move in (move for visit in sweep for move in visit.sends):
                chunk = sums[move.begin : move.end].to(layout.wire)
                messages.append(dist.P2POp(dist.isend, chunk, group=self._group, group_peer=move.peer))
            for move in (move for visit in next_sweep for move in visit.receives):
                target = sums[move.begin : move.end]
                if move.kind is Kind.ADD or compressed:
                    target = arrived[move] = torch.empty_like(target, dtype=layout.wire)
                messages.append(dist.P2POp(dist.irecv, target, group=self._group, group_peer=move.peer))
            if messages:
                for work in dist.batch_isend_irecv(messages):
                    work.wait()  # on the stream
