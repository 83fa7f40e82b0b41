"""Give a DistributedDataParallel model the all-reduce of its user's choice, and a timeline of it."""

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from trainer.comm.execution.blame import CommError, PeerError, find_culprit
from trainer.comm.execution.executor import CpuExecutor
from trainer.comm.execution.nccl import NcclReducer
from trainer.comm.execution.worker import Worker
from trainer.comm.schedules.algorithms import build
from trainer.comm.schedules.pipeline import SEGMENT_MB
from trainer.comm.timeline.gpu_clock import GpuClock
from trainer.comm.timeline.records import BucketRecord, Timeline

WIRE_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What sums travel as; fp32 means uncompressed, in the dtype of the gradients."""

Reduce = Callable[[dist.GradBucket, BucketRecord], Future[torch.Tensor]]
Enter = Callable[[str, int], None]


class CommHook:
    """The gradient all-reduce of one DDP model, at work; made by `attach`.

    Attributes:
        timeline: what it costs, and who is waited for.
    """

    def __init__(self, timeline: Timeline, reduce: Reduce | Worker, enter: Enter) -> None:
        self.timeline = timeline
        self._enter = enter
        self._worker = reduce if isinstance(reduce, Worker) else None
        self._reduce = reduce.submit if isinstance(reduce, Worker) else reduce

    def reduce(self, state: None, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """What DDP calls when a bucket of gradients is complete."""
        self._enter("all_reduce", bucket.index())
        record = self.timeline.arrive(bucket.index(), bucket.buffer().nbytes, bucket.is_last())
        with record_function(f"all-reduce {record.label}") as profiled:
            future = self._reduce(bucket, record)
            # The range must begin here, on a thread that the profiler watches, and end when the bucket is
            # done, wherever that is; torch has no public call for it.
            return profiled._call_end_callbacks_on_future(future)

    @contextmanager
    def plain_errors(self) -> Iterator[None]:
        """Around a backward pass: raise what went wrong itself (a CommError), not what DDP makes of it."""
        try:
            yield
        except RuntimeError:
            if self._worker is not None and self._worker.error is not None:
                raise self._worker.error from None
            raise

    def close(self) -> None:
        """End the worker thread, and with it all backward passes. Not for error paths: there, just leave."""
        if self._worker is not None:
            self._worker.close()


def attach(
    model: DistributedDataParallel,
    algorithm: str,
    *,
    hosts: Sequence[int],
    wire_dtype: str = "fp32",
    segment_mb: float = SEGMENT_MB,
    timeout_s: float = 600.0,
    powersgd: Mapping[str, Any] | None = None,
    enter: Enter = lambda phase, bucket: None,
) -> CommHook:
    """Make `algorithm` the gradient all-reduce of `model`; a collective of all ranks.

    Gradients become their mean over ranks: a schedule's owners divide the sum (with fp16 on the wire each
    rank its own gradients, lest the sum overflow), `native` and `powersgd` divide before they add.

    Args:
        algorithm: a schedule by name; `native`, the backend's own; or `powersgd`, torch's hook (source:
            Vogels et al., "PowerSGD: Practical low-rank gradient compression", NeurIPS 2019).
        hosts: host index of every rank.
        wire_dtype: fp32 | bf16 | fp16. A schedule adds up in fp32 whatever the wire carries; `native` adds
            in the wire's dtype, as the backend does. PowerSGD has no use for it.
        segment_mb: MiB per segment of the pipeline; schedules only.
        timeout_s: the longest wait for a neighbour.
        powersgd: keyword arguments of torch's PowerSGDState.
        enter: told `("all_reduce", bucket)` of each bucket before it is handed on.

    Raises:
        ValueError: an unknown algorithm or wire dtype, or a setting PowerSGD refuses.
    """
    if wire_dtype not in WIRE_DTYPES:
        raise ValueError(f"no wire dtype {wire_dtype!r}; there are {', '.join(WIRE_DTYPES)}")
    device = next(model.parameters()).device
    gpu_clock = GpuClock(device) if device.type == "cuda" else None
    group = _new_group("gloo", timeout_s)
    timeline = Timeline(group, hosts, gpu_clock)
    reduce: Reduce | Worker
    if algorithm == "native":
        reduce = _native(WIRE_DTYPES[wire_dtype], len(hosts), gpu_clock)
    elif algorithm == "powersgd":
        reduce = _powersgd(powersgd or {}, group, gpu_clock)
    else:
        schedule, wire = build(algorithm, timeline.rank, hosts), WIRE_DTYPES[wire_dtype]
        segment_bytes = int(segment_mb * 2**20)
        if gpu_clock is not None:
            nccl = _new_group("nccl", timeout_s)
            reduce = NcclReducer(
                nccl, group, schedule, gpu_clock, wire, segment_bytes, timeout_s, len(hosts)
            ).submit
        else:
            executor = CpuExecutor(group, schedule, hosts, wire, segment_bytes, timeout_s=timeout_s)
            reduce = _scheduled(executor, algorithm, group, timeline)
    hook = CommHook(timeline, reduce, enter)
    model.register_comm_hook(None, hook.reduce)
    return hook


def _new_group(backend: str, timeout_s: float) -> dist.ProcessGroup:
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup), "this process is outside the group of all ranks"
    return group


def _native(wire_dtype: torch.dtype | None, divisor: int, gpu_clock: GpuClock | None) -> Reduce:
    def reduce(bucket: dist.GradBucket, record: BucketRecord) -> Future[torch.Tensor]:
        gradients = bucket.buffer()
        sent = gradients if wire_dtype is None else gradients.to(wire_dtype)
        finish = _finisher(record, gpu_clock)
        # Divided first, or half precision would overflow in the sum.
        work = dist.all_reduce(sent.div_(divisor), async_op=True)

        def take(done: Future[list[torch.Tensor]]) -> torch.Tensor:
            mean = done.value()[0]
            if mean is not gradients:
                gradients.copy_(mean)
            finish()
            return gradients

        return work.get_future().then(take)

    return reduce


def _powersgd(
    settings: Mapping[str, Any], group: dist.ProcessGroup, gpu_clock: GpuClock | None
) -> Reduce | Worker:
    if gpu_clock is None:
        # gloo runs a bucket's follow-up reductions when its first is done, in an order of its own on every
        # rank; with two buckets under way, ranks would mix them up. So one at a time.
        state = powerSGD_hook.PowerSGDState(group, **settings)
        return Worker(lambda bucket, record: powerSGD_hook.powerSGD_hook(state, bucket).wait())
    state = powerSGD_hook.PowerSGDState(None, **settings)

    def reduce(bucket: dist.GradBucket, record: BucketRecord) -> Future[torch.Tensor]:
        finish = _finisher(record, gpu_clock)

        def take(done: Future[torch.Tensor]) -> torch.Tensor:
            finish()
            return done.value()

        return powerSGD_hook.powerSGD_hook(state, bucket).then(take)

    return reduce


def _finisher(record: BucketRecord, gpu_clock: GpuClock | None) -> Callable[[], None]:
    """What to call when a Future of torch's is done. It cannot tell when it began to move the bucket."""
    record.start = record.ready
    if gpu_clock is None:

        def finish() -> None:
            record.end = time.perf_counter()

        return finish
    ready = gpu_clock.mark()

    def finish_gpu() -> None:
        record.read_gpu = gpu_clock.times(ready, ready, gpu_clock.mark())

    return finish_gpu


def _scheduled(executor: CpuExecutor, algorithm: str, group: dist.ProcessGroup, timeline: Timeline) -> Worker:
    names = [""] * dist.get_world_size(group)
    dist.all_gather_object(names, socket.gethostname(), group=group)

    def place(rank: int) -> str:
        return f"rank {rank} on host {names[rank]}"

    def all_reduce(bucket: dist.GradBucket, record: BucketRecord) -> torch.Tensor:
        try:
            record.waited_s = executor.all_reduce(bucket.buffer(), divisor=len(names))
        except PeerError as error:
            culprit = find_culprit(group.get_group_store(), timeline.rank, error)
            message = (
                f"the all-reduce ({algorithm}) of {record.label} in backward pass {timeline.num_passes} "
                f"stopped at {place(timeline.rank)}: {place(error.peer)} {error.reason}"
            )
            if culprit != error.peer:
                message += f"; that one waits in turn, and the one that nobody hears from is {place(culprit)}"
            raise CommError(message, culprit) from error
        return bucket.buffer()

    return Worker(all_reduce, executor.close)
