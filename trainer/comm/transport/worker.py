"""A thread that moves buckets one after another during the backward pass; the caller may move the last."""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from torch.futures import Future

from trainer.comm.timeline import BucketRecord

Task = tuple[Any, BucketRecord, Future[torch.Tensor]]


class Worker:
    """Processes buckets in the given order and answers each with a Future.

    After one failure every later bucket fails with the same error: its peers are no longer in step.

    Args:
        all_reduce: takes a bucket as submitted; returns its mean over all ranks.
        release: called at the end, after the last `all_reduce`.
    """

    def __init__(
        self,
        all_reduce: Callable[[Any, BucketRecord], torch.Tensor],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.error: Exception | None = None
        self._all_reduce, self._release = all_reduce, release
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._newest: Future[torch.Tensor] | None = None
        # A daemon: a thread that waits for a peer must not keep a failing process alive.
        self._thread = threading.Thread(target=self._work, name="all-reduce", daemon=True)
        self._thread.start()

    def submit(self, bucket: Any, record: BucketRecord) -> Future[torch.Tensor]:
        """Queue a bucket of DDP for the all-reduce; the Future's value is the mean.

        After the last bucket of a pass DDP only waits. If the thread is idle then, the caller moves that
        bucket itself, which saves a switch between threads.
        """
        future: Future[torch.Tensor] = Future()
        if bucket.is_last() and (self._newest is None or self._newest.done()):
            self._move(bucket, record, future)
        else:
            self._newest = future
            self._tasks.put((bucket, record, future))
        # DDP, which waits in C++, sees an error only if a callback raises it.
        return future.then(lambda done: done.value())

    def close(self) -> None:
        """End the thread, after the buckets already queued."""
        self._tasks.put(None)
        self._thread.join(timeout=10.0)
        self._release()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._move(*task)

    def _move(self, bucket: Any, record: BucketRecord, future: Future[torch.Tensor]) -> None:
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
