"""Run schedules on GPU tensors with NCCL's point-to-point messages, on a stream beside the backward pass."""

from collections.abc import Callable
from typing import Any

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

_Key = tuple[int, Layout]  # where a bucket lies, and what it is


class NcclReducer:
    """All-reduces buckets by launching work on a side stream; nothing here waits for the GPU.

    A sweep's messages, those of all segments in flight, are one NCCL group: links inside the host and between
    hosts are busy together. A peer that is gone or silent is NCCL's watchdog's to find, after the timeout of
    `group`.

    A bucket costs the host, on the thread that also launches the backward pass, a group for each round and
    segment. So it is one segment, unless it is to be cut. With `cuda_graph` the launches are recorded when a
    bucket comes for the second time in the same place (the first has made the connections), and played back
    from then on, in one call.

    Args:
        group: an NCCL group of all ranks that nobody else uses.
        cpu_group: a gloo group of the same ranks, to compare layouts on.
        schedule: this rank's part.
        clock: of the GPU on which the buckets are.
        wire_dtype, timeout_s: as for `CpuExecutor`.
        segment_bytes: bytes that travel as one; None: all of a bucket.
        divisor: what the sums are divided by.
        cuda_graph: whether to record and play back; what is computed is the same.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        cpu_group: dist.ProcessGroup,
        schedule: Schedule,
        clock: GpuClock,
        wire_dtype: torch.dtype | None,
        segment_bytes: int | None,
        timeout_s: float,
        divisor: int,
        cuda_graph: bool = False,
    ) -> None:
        self._group, self._schedule, self._clock, self._device = group, schedule, clock, clock.device
        self._wire_dtype, self._segment_bytes = wire_dtype, segment_bytes
        self._divisor, self._cuda_graph = divisor, cuda_graph
        self._recorded: dict[int, tuple[_Key, Callable[[], None] | None]] = {}  # by the bucket's index
        self._pool = torch.cuda.graph_pool_handle() if cuda_graph else None
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
            segment_bytes = self._segment_bytes or max(1, layout.numel * itemsize)
            self._programs[layout] = lay_out(self._schedule, layout.numel, itemsize, segment_bytes, _WIDTH)
        ready = self._clock.mark()
        self._stream.wait_event(ready)
        gradients.record_stream(self._stream)
        future: Future[torch.Tensor] = Future(devices=[self._device])
        with torch.cuda.stream(self._stream):
            start = self._clock.mark()
            self._launch(bucket.index(), gradients, layout)
            record.read_gpu = self._clock.times(ready, start, self._clock.mark())
            future.set_result(gradients)  # takes note of the current stream
        return future

    def _launch(self, index: int, gradients: torch.Tensor, layout: Layout) -> None:
        """Put all of a bucket's work on the current stream, by playing it back if it was recorded."""
        key: _Key = (gradients.data_ptr(), layout)
        known, play = self._recorded.get(index, (None, None))
        if self._cuda_graph and known == key:
            if play is None:
                play = _recorded(lambda: self._all_reduce(gradients, layout), self._stream, self._pool)
                self._recorded[index] = key, play
            play()
            return
        self._recorded[index] = key, None
        self._all_reduce(gradients, layout)

    def _all_reduce(self, gradients: torch.Tensor, layout: Layout) -> None:
        sums = gradients.to(layout.sum_dtype)
        divisor = self._divisor
        if layout.wire == torch.float16:  # see CpuExecutor.all_reduce
            sums.div_(divisor)
            divisor = 1
        self._run(self._programs[layout], sums, layout, divisor)
        if sums is not gradients:
            gradients.copy_(sums)

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


def _recorded(work: Callable[[], None], stream: torch.cuda.Stream, pool: Any) -> Callable[[], None]:
    """What plays back the launches of `work`, which are recorded on `stream` and not made now.

    Only this thread's calls are held to what may be recorded: NCCL's watchdog goes on asking for events.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        work()
    return graph.replay
