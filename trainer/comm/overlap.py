"""Reduce buckets during the backward pass, in a thread on CPUs, and on a side stream on a GPU."""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from torch.futures import Future

from trainer import accelerator
from trainer.comm.timeline import BucketRecord, GpuClock

AllReduce = Callable[[Any, BucketRecord], torch.Tensor]
"""Takes a submitted bucket, and returns its mean over all ranks."""

Task = tuple[Any, BucketRecord, Future[torch.Tensor]]


class SideStream:
    """Queues the all-reduce of each bucket on a side stream, without blocking the CPU.

    Each bucket is marked as in use by the side stream (`Tensor.record_stream`), because the backward pass may
    reuse its memory after the gradients have been read.
    """

    def __init__(self, all_reduce: AllReduce, clock: GpuClock) -> None:
        self.error: Exception | None = None
        self._all_reduce, self._clock = all_reduce, clock
        self._stream = accelerator.stream(clock.device)

    def submit(self, bucket: Any, record: BucketRecord) -> Future[torch.Tensor]:
        """Queue the all-reduce after the work that is on the current stream."""
        future: Future[torch.Tensor] = Future(devices=[self._clock.device])
        ready = self._clock.mark()
        self._stream.wait_event(ready)
        accelerator.keep_for(bucket.buffer(), self._stream)
        with accelerator.on(self._stream):
            start = self._clock.mark()
            mean = self._all_reduce(bucket, record)
            record.read_gpu = self._clock.times(ready, start, self._clock.mark())
            future.set_result(mean)  # records the current stream
        return future

    def close(self) -> None:
        """Do nothing, because destroying NCCL's process group ends queued work."""


class Worker:
    """A thread that reduces buckets in the order in which they were submitted.

    After a failure, every later bucket fails with the same error, because ranks may now differ in what they
    send.

    Args:
        release: called by `close`, after the last `all_reduce`.
    """

    def __init__(
        self,
        all_reduce: AllReduce,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.error: Exception | None = None
        self._all_reduce, self._release = all_reduce, release
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._newest: Future[torch.Tensor] | None = None
        # A daemon, so that a thread that waits for a peer does not keep a failing process alive.
        self._thread = threading.Thread(target=self._work, name="all-reduce", daemon=True)
        self._thread.start()

    def submit(self, bucket: Any, record: BucketRecord) -> Future[torch.Tensor]:
        """Queue a bucket of DDP for the all-reduce, and return a Future of the mean.

        After the last bucket of a pass, DDP only waits. So if the thread is idle then, the caller reduces
        that bucket itself, which saves a switch between threads.
        """
        future: Future[torch.Tensor] = Future()
        if bucket.is_last() and (self._newest is None or self._newest.done()):
            self._reduce(bucket, record, future)
        else:
            self._newest = future
            self._tasks.put((bucket, record, future))
        # DDP waits in C++, and sees an error only if a callback raises it.
        return future.then(lambda done: done.value())

    def close(self) -> None:
        """Stop the thread after the queued buckets."""
        self._tasks.put(None)
        self._thread.join(timeout=10.0)
        self._release()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._reduce(*task)

    def _reduce(self, bucket: Any, record: BucketRecord, future: Future[torch.Tensor]) -> None:
        record.start = time.perf_counter()
        try:
            if self.error is not None:
                raise self.error
            mean = self._all_reduce(bucket, record)
        except Exception as error:
            self.error = error
            record.end = time.perf_counter()
            future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong
        else:
            record.end = time.perf_counter()
            future.set_result(mean)
