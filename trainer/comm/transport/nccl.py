"""Runs schedules on GPU tensors with NCCL's point-to-point messages, on a stream beside the backward pass."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from trainer.comm.algorithms.program import Move, Visit, lay_out
from trainer.comm.algorithms.schedule import Collective, Kind, Schedule
from trainer.comm.leaf_sums import Message
from trainer.comm.timeline.gpu_clock import GpuClock
from trainer.comm.timeline.records import BucketRecord
from trainer.comm.transport.bucket_layout import Layout, agree
from trainer.comm.transport.gloo import GlooLinks

_WIDTH = 1  # a sweep's messages are all in flight together, so one segment per stage keeps every link busy

_Key = tuple[int, Layout]  # the address of a bucket, and its layout


class NcclReducer:
    """Runs one schedule on buckets by launching work on a side stream; nothing here waits for the GPU.

    A sweep's messages, of all segments in flight, are one NCCL group: links inside the host and between hosts
    are busy together. NCCL's watchdog finds a peer that is gone or silent, after the timeout of `group`.

    A bucket costs the host, on the thread that also launches the backward pass, a group for each round and
    segment. So by default a bucket is one segment. With `cuda_graph` the launches are recorded when a
    bucket comes for the second time at the same address (the first time connects), and replayed from then on
    in one call.

    Args:
        group: an NCCL group of all ranks that has no other user.
        links: of the same ranks over gloo, to compare layouts.
        schedule: this rank's part.
        clock: of the GPU of the buckets.
        wire_dtype: as for `CpuExecutor`.
        segment_bytes: bytes sent at once; None: the whole bucket.
        cuda_graph: whether to record and replay; results are the same.
        collective: the operation of the schedule.
        stream: to launch on, the same for all that use `group`; None creates one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        links: GlooLinks,
        schedule: Schedule,
        clock: GpuClock,
        wire_dtype: torch.dtype | None,
        segment_bytes: int | None = None,
        cuda_graph: bool = False,
        collective: Collective = Collective.ALL_REDUCE,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._group, self._schedule, self._clock, self._collective = group, schedule, clock, collective
        self._wire_dtype, self._segment_bytes = wire_dtype, segment_bytes
        self._cuda_graph = cuda_graph
        self._recorded: dict[int, tuple[_Key, Callable[[], None] | None]] = {}  # by bucket
        self._pool = torch.cuda.graph_pool_handle() if cuda_graph else None
        self.stream = stream or torch.cuda.Stream(clock.device)
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

        Raises:
            PeerError, ValueError: as `CpuExecutor.run`, at the first bucket of a layout.
        """
        gradients = bucket.buffer()
        future: Future[torch.Tensor] = Future(devices=[self._clock.device])
        marks = self.launch(gradients, divisor, index=bucket.index())
        record.read_gpu = self._clock.times(*marks)
        with torch.cuda.stream(self.stream):
            future.set_result(gradients)  # records the current stream
        return future

    def launch(
        self, bucket: torch.Tensor, divisor: int, number: int = 0, index: int = 0
    ) -> tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event]:
        """Do on the side stream what `CpuExecutor.run` does, after the work now on the current stream.

        Args:
            index: a key for the recording of a bucket.

        Returns:
            Marks of the current stream now, and of the side stream at begin and end.

        Raises:
            PeerError, ValueError: as `CpuExecutor.run`, at the first bucket of a layout.
        """
        layout = Layout.of(bucket, self._wire_dtype, self._collective, number)
        if layout not in self._agreed:
            agree(layout, self._receive_from, self._send_to, self._links)
            self._agreed.add(layout)
        ready = self._clock.mark()
        self.stream.wait_event(ready)
        bucket.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            start = self._clock.mark()
            self._launch(index, bucket, layout, divisor)
            return ready, start, self._clock.mark()

    def _launch(self, index: int, bucket: torch.Tensor, layout: Layout, divisor: int) -> None:
        """Launch a bucket's work on the current stream, by replaying it if it was recorded."""
        key: _Key = (bucket.data_ptr(), layout)
        known, play = self._recorded.get(index, (None, None))
        if self._cuda_graph and known == key:
            if play is None:
                play = _recorded(lambda: self._collect(bucket, layout, divisor), self.stream, self._pool)
                self._recorded[index] = key, play
            play()
            return
        self._recorded[index] = key, None
        self._collect(bucket, layout, divisor)

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
                    if compressed and self._schedule.gather:  # the owner keeps the rounded values, too
                        owned.copy_(owned.to(layout.wire))
            messages = []
            for move in (move for visit in sweep for move in visit.sends):
                chunks = [sums[begin:end] for begin, end in move.ranges]
                chunk = (chunks[0] if len(chunks) == 1 else torch.cat(chunks)).to(layout.wire)
                messages.append(dist.P2POp(dist.isend, chunk, group=self._group, group_peer=move.peer))
            for move in (move for visit in next_sweep for move in visit.receives):
                if move.kind is Kind.ADD or compressed or len(move.ranges) > 1:
                    target = arrived[move] = sums.new_empty(move.numel, dtype=layout.wire)
                else:
                    target = sums[slice(*move.ranges[0])]
                messages.append(dist.P2POp(dist.irecv, target, group=self._group, group_peer=move.peer))
            if messages:
                for work in dist.batch_isend_irecv(messages):
                    work.wait()  # on the stream


def _recorded(work: Callable[[], None], stream: torch.cuda.Stream, pool: Any) -> Callable[[], None]:
    """Record the launches of `work` on `stream`, without running them; return a function that replays them.

    Only this thread's calls are restricted while recording: NCCL's watchdog continues to query events.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        work()
    return graph.replay
