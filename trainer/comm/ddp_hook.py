"""Gives a DistributedDataParallel model the chosen all-reduce, and a timeline of it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function
from torch.distributed.algorithms.join import JoinHook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from trainer.comm.algorithms.all_reduce import build
from trainer.comm.leaf_sums import LeafSums, Message
from trainer.comm.timeline import BucketRecord, GpuClock, Timeline
from trainer.comm.transport.members import Members
from trainer.comm.transport.transport import Transport
from trainer.comm.transport.worker import Worker

Reduce = Callable[[dist.GradBucket | Message, BucketRecord], Future[torch.Tensor]]
UsersHook = Callable[[dist.GradBucket], Future[torch.Tensor]]
Enter = Callable[[str, int], None]


class CommHook:
    """The gradient all-reduce of one DDP model; created by `attach`.

    Attributes:
        timeline: what the all-reduce costs, and which ranks are waited for.
    """

    def __init__(
        self, timeline: Timeline, reduce: Reduce | Worker, enter: Enter, leaf_sums: LeafSums | None = None
    ) -> None:
        self.timeline, self._enter, self._leaf_sums = timeline, enter, leaf_sums
        self._worker = reduce if isinstance(reduce, Worker) else None
        self._reduce = reduce.submit if isinstance(reduce, Worker) else reduce

    def reduce(self, state: None, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """Called by DDP when a bucket of gradients is complete."""
        self._enter("all_reduce", bucket.index())
        sent = bucket if self._leaf_sums is None else self._leaf_sums.message(bucket)
        record = self.timeline.arrive(bucket.index(), sent.buffer().nbytes, bucket.is_last())
        if not torch.autograd._profiler_enabled():  # a range costs 30 us, and only the profiler sees it
            return self._reduced(sent, record)
        with record_function(f"all-reduce {record.label}") as profiled:
            # The range must begin here, on a thread that the profiler watches, and end when the bucket is
            # done, on any thread; torch has no public call for it.
            return profiled._call_end_callbacks_on_future(self._reduced(sent, record))

    def _reduced(self, sent: dist.GradBucket | Message, record: BucketRecord) -> Future[torch.Tensor]:
        future = self._reduce(sent, record)
        return future.then(partial(_decoded, sent)) if isinstance(sent, Message) else future

    @contextmanager
    def plain_errors(self) -> Iterator[None]:
        """Around a backward pass: raise the original error (a CommError), not what DDP makes of it."""
        try:
            yield
        except RuntimeError:
            if self._worker is not None and self._worker.error is not None:
                raise self._worker.error from None
            raise

    def close(self) -> None:
        """End the worker thread, and with it all backward passes. On error paths, exit without it."""
        if self._worker is not None:
            self._worker.close()


def attach(
    model: DistributedDataParallel,
    algorithm: str,
    *,
    hosts: Sequence[int],
    wire_dtype: str = "fp32",
    segment_mb: float | None = None,
    timeout_s: float = 600.0,
    hook: UsersHook | None = None,
    enter: Enter = lambda phase, bucket: None,
    leaf_sums: LeafSums | None = None,
) -> CommHook:
    """Make `algorithm` the gradient all-reduce of `model`; a collective of the ranks that share the model.

    These are the ranks of the model's own process group; other ranks take no part. torch requires that these
    ranks have created the same number of groups before.

    Gradients become their mean over ranks: a schedule divides the sum on the rank that owns it (with fp16 on
    the wire each rank divides its own gradients, so that the sum does not overflow), `native` divides before
    it adds. Under `model.join`, a rank without data left adds zeros and is counted.

    Args:
        algorithm: a schedule by name; `native`, the backend's own; or `hook`, the given one.
        hosts: host index of every rank, of the world or of the model's group, in the order of ranks.
        wire_dtype: fp32 | bf16 | fp16. A schedule always adds in fp32; `native` adds in the dtype of the
            wire, as the backend does. `hook` ignores it.
        segment_mb: see `Transport`; schedules only.
        timeout_s: the longest wait for a neighbour.
        hook: any communication hook of DDP, with its state; gives the mean of a bucket over ranks.
        enter: called with `("all_reduce", bucket)` before the all-reduce of each bucket starts.
        leaf_sums: what turns buckets into integers; gradients then become their sum over ranks. Not for
            `hook`.

    Raises:
        ValueError: an unknown algorithm or wire dtype, or hosts for another number of ranks.
    """
    device = next(model.parameters()).device
    transport = Transport(model.process_group, hosts, device, wire_dtype, segment_mb, timeout_s)
    divisor = len(transport.hosts) if leaf_sums is None else 1
    reduce: Reduce | Worker
    if algorithm == "native":
        reduce = _native(model.process_group, divisor, transport.wire, transport.clock)
    elif hook is not None:
        reduce = _by_hook(hook, transport.clock)
    else:
        reduce = _scheduled(transport, algorithm, divisor)
    attached = CommHook(transport.timeline, reduce, enter, leaf_sums)
    model.register_comm_hook(None, attached.reduce)
    model.join_hook = partial(_join_hook, model)  # type: ignore[method-assign]
    return attached


def _join_hook(model: DistributedDataParallel, **settings: Any) -> JoinHook:
    """DDP's own, unless gradients would have to be divided by the number of ranks that still have data.

    DDP then divides by itself, and does not tell a communication hook the number.
    """
    if not settings.get("divide_by_initial_world_size", True):
        raise ValueError(
            "join(divide_by_initial_world_size=False) needs DDP's own all-reduce: a communication hook "
            "divides by all ranks of the model's group; leave the argument out, or train without a hook"
        )
    return DistributedDataParallel.join_hook(model, **settings)


def _decoded(message: Message, done: Future[torch.Tensor]) -> torch.Tensor:
    done.value()  # raises the error of the all-reduce
    return message.decoded()


def _native(
    group: dist.ProcessGroup,
    divisor: int,
    wire_dtype: torch.dtype | None,
    gpu_clock: GpuClock | None,
) -> Reduce:
    def reduce(bucket: dist.GradBucket | Message, record: BucketRecord) -> Future[torch.Tensor]:
        gradients = bucket.buffer()
        sent = gradients if wire_dtype is None else gradients.to(wire_dtype)
        finish = _finisher(record, gpu_clock)
        # Divide first, or half precision would overflow in the sum.
        work = dist.all_reduce(sent.div_(divisor) if divisor != 1 else sent, group=group, async_op=True)

        def take(done: Future[list[torch.Tensor]]) -> torch.Tensor:
            received = done.value()[0]
            if received is not gradients:
                gradients.copy_(received)
            finish()
            return gradients

        sum_ = work.get_future()
        if gpu_clock is not None or not bucket.is_last():
            return sum_.then(take)
        # DDP would wait next. A callback would run on gloo's thread, which has to get the interpreter first.
        sum_.wait()
        mean: Future[torch.Tensor] = Future()
        mean.set_result(take(sum_))
        return mean

    return reduce


def _by_hook(hook: UsersHook, gpu_clock: GpuClock | None) -> Reduce:
    def reduce(bucket: dist.GradBucket | Message, record: BucketRecord) -> Future[torch.Tensor]:
        assert isinstance(bucket, dist.GradBucket), "the all-reduce of integers is another"
        finish = _finisher(record, gpu_clock)

        def take(done: Future[torch.Tensor]) -> torch.Tensor:
            finish()
            return done.value()

        if gpu_clock is not None:
            return hook(bucket).then(take)
        # gloo runs what a hook starts in a callback when its first message is done, in an order that differs
        # between ranks; with two buckets in flight, ranks would mix them up. So reduce one at a time.
        future = hook(bucket)
        future.wait()
        finish()
        return future

    return reduce


def _finisher(record: BucketRecord, gpu_clock: GpuClock | None) -> Callable[[], None]:
    """Called when a Future of torch is done, which does not tell when torch began to move the bucket."""
    record.start = record.ready
    if gpu_clock is None:

        def finish() -> None:
            record.end = time.perf_counter()

        return finish
    ready = gpu_clock.mark()

    def finish_gpu() -> None:
        record.read_gpu = gpu_clock.times(ready, ready, gpu_clock.mark())

    return finish_gpu


def _scheduled(transport: Transport, algorithm: str, divisor: int) -> "Reduce | Worker":
    schedule = build(algorithm, transport.rank, transport.hosts)
    if transport.clock is not None:
        return partial(transport.on_gpu(schedule).submit, divisor=divisor)
    executor, timeline = transport.on_cpu(schedule), transport.timeline
    members = Members(transport.group)

    def all_reduce(bucket: dist.GradBucket | Message, record: BucketRecord) -> torch.Tensor:
        what = f"the all-reduce ({algorithm}) of {record.label} in backward pass {timeline.num_passes}"
        with members.named(what):
            executor.run(bucket.buffer(), divisor)
        return bucket.buffer()

    return Worker(all_reduce, executor.close)
