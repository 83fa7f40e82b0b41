"""Attach an all-reduce algorithm and a recorder of its times to a DistributedDataParallel model."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from trainer import accelerator
from trainer.comm.algorithms.all_reduce import build
from trainer.comm.executor import Executor
from trainer.comm.overlap import SideStream, Worker
from trainer.comm.timeline import BucketRecord, GpuClock, Timeline
from trainer.exact.chunk_sums import ChunkSums, Message
from trainer.torch_private import profiler_enabled

WIRE_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes in which chunks are sent; None for fp32: uncompressed, in the dtype of the data."""

_NATIVE = {"fp32": allreduce_hook, "bf16": bf16_compress_hook, "fp16": fp16_compress_hook}
Reduce = Callable[[dist.GradBucket | Message, BucketRecord], Future[torch.Tensor]]
Hook = Callable[[Any], Future[torch.Tensor]]  # takes a bucket or a Message
Enter = Callable[[str, int], None]


class CommHook:
    """The gradient all-reduce of one DDP model, which `attach` creates.

    Attributes:
        timeline: measures the time of the all-reduce, and finds late ranks.
    """

    def __init__(
        self,
        timeline: Timeline,
        reduce: Reduce,
        runner: Worker | SideStream | None,
        enter: Enter,
        chunk_sums: ChunkSums | None,
    ) -> None:
        self.timeline, self._enter, self._chunk_sums = timeline, enter, chunk_sums
        self._reduce, self._runner = reduce, runner

    def reduce(self, state: None, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """Reduce a complete bucket of gradients; called by DDP."""
        self._enter("all_reduce", bucket.index())
        sent = bucket if self._chunk_sums is None else self._chunk_sums.message(bucket)
        record = self.timeline.arrive(bucket.index(), sent.buffer().nbytes, bucket.is_last())
        if not profiler_enabled():  # a range costs 30 us
            return self._reduced(sent, record)
        with record_function(f"all-reduce {record.label}") as profiled:
            # The range must start here, on a thread that the profiler observes, and end when the bucket is
            # done, on any thread; torch has no public API for this.
            return profiled._call_end_callbacks_on_future(self._reduced(sent, record))

    def _reduced(self, sent: dist.GradBucket | Message, record: BucketRecord) -> Future[torch.Tensor]:
        future = self._reduce(sent, record)
        return future.then(partial(_decoded, sent)) if isinstance(sent, Message) else future

    @contextmanager
    def original_errors(self) -> Iterator[None]:
        """Raise the original error of the all-reduce instead of the RuntimeError that DDP raises for it."""
        try:
            yield
        except RuntimeError:
            if self._runner is not None and self._runner.error is not None:
                raise self._runner.error from None
            raise

    def close(self) -> None:
        """Stop the worker thread after the last backward pass. Do not call this on error paths."""
        if self._runner is not None:
            self._runner.close()


def attach(
    model: DistributedDataParallel,
    algorithm: str,
    *,
    hosts: Sequence[int],
    wire_dtype: str = "fp32",
    segment_mb: float | None = None,
    timeout_s: float = 600.0,
    hook: Hook | None = None,
    enter: Enter = lambda phase, bucket: None,
    chunk_sums: ChunkSums | None = None,
) -> CommHook:
    """Make `algorithm` the gradient all-reduce of `model` (a collective of all ranks).

    Gradients are averaged over ranks. In a schedule, the rank that owns a sum divides it, or with wire_dtype
    fp16, each rank divides its gradients first, so that the sum does not overflow. `native` divides before it
    adds.

    Args:
        algorithm: the name of a schedule; `native` for the backend's all-reduce, by torch's default hooks; or
            `hook` for the argument `hook`.
        wire_dtype: fp32 | bf16 | fp16. A schedule always adds in fp32; `native` adds in the wire dtype, as
            the backend does. `hook` ignores it.
        segment_mb: see `Executor`; schedules only.
        hook: a communication hook of DDP, bound to its state, which returns the mean of a bucket over ranks.
        enter: called with `("all_reduce", bucket)`, where bucket is an index, before each all-reduce.
        chunk_sums: converts buckets to integers, which are summed over ranks, not averaged. Not supported
            with `hook`.
    """
    device = next(model.parameters()).device
    clock = GpuClock(device) if accelerator.is_accelerator(device) else None
    runner: Worker | SideStream | None = None
    if algorithm == "native":
        native = partial(_NATIVE[wire_dtype], model.process_group) if chunk_sums is None else _summed
        reduce = _by_hook(native, clock, one_at_a_time=False)
    elif hook is not None:
        reduce = _by_hook(hook, clock, one_at_a_time=True)
    else:
        schedule = build(algorithm, dist.get_rank(), hosts)
        backend = dist.get_default_backend_for_device(device)
        own = cast(dist.ProcessGroup, dist.new_group(None, timedelta(seconds=timeout_s), backend))
        wire = WIRE_DTYPES[wire_dtype]
        executor = Executor(own, schedule, device, wire, segment_mb, hosts=hosts, timeout_s=timeout_s)
        divisor = len(hosts) if chunk_sums is None else 1

        def all_reduce(bucket: dist.GradBucket | Message, record: BucketRecord) -> torch.Tensor:
            executor.run(bucket.buffer(), divisor)
            return bucket.buffer()

        runner = Worker(all_reduce, executor.close) if clock is None else SideStream(all_reduce, clock)
        reduce = runner.submit
    facts = {"device": device.type, "hosts": list(hosts), "wire_dtype": wire_dtype}
    attached = CommHook(Timeline(clock, facts if hook is None else None), reduce, runner, enter, chunk_sums)
    model.register_comm_hook(None, attached.reduce)
    return attached


def _decoded(message: Message, done: Future[torch.Tensor]) -> torch.Tensor:
    done.value()  # raises the error of the all-reduce
    return message.decoded()


def _summed(message: Message) -> Future[torch.Tensor]:
    work = dist.all_reduce(message.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def _by_hook(hook: Hook, gpu_clock: GpuClock | None, one_at_a_time: bool) -> Reduce:
    """Return a function that passes buckets to a DDP communication hook, and records their times.

    Args:
        one_at_a_time: wait for each bucket. A hook may start more messages in a callback, and gloo runs
            callbacks in an order that differs between ranks, so two buckets in flight could be mixed up.
    """

    def reduce(bucket: dist.GradBucket | Message, record: BucketRecord) -> Future[torch.Tensor]:
        record.start = record.ready  # a Future does not report when its work started
        ready = None if gpu_clock is None else gpu_clock.mark()

        def finish(done: Future[torch.Tensor]) -> torch.Tensor:
            if gpu_clock is None:
                record.end = time.perf_counter()
            else:
                record.read_gpu = gpu_clock.times(ready, ready, gpu_clock.mark())
            return done.value()

        future = hook(bucket)
        # After the last bucket, DDP waits anyway, and a callback on gloo's thread would first need the GIL.
        if gpu_clock is None and (one_at_a_time or bucket.is_last()):
            future.wait()
            finish(future)
            return future
        return future.then(finish)

    return reduce
