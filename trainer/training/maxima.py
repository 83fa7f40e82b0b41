"""The largest of each number over all ranks, once in a step, while the backward pass runs."""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed.process_group import Dist

COUNT = 5  # numbers of each rank


class Maxima(Protocol):
    """`start` and `finish` take turns, on every rank the same number of times."""

    def start(self, loss: Tensor, values: Sequence[float]) -> None:
        """Send COUNT numbers: `rank + 1`, or 0 if `loss` (a detached scalar) is finite, and `values`."""

    def finish(self) -> Sequence[float]:
        """Wait for the numbers of all ranks; return the largest of each."""


def maxima_over(dist_: Dist) -> Maxima:
    return GpuMaxima(dist_) if dist_.device.type == "cuda" else HostMaxima(dist_)


class HostMaxima:
    """On CPUs: an all-reduce, hidden behind the backward pass; nothing is sent by a process that is alone."""

    def __init__(self, dist_: Dist) -> None:
        self._rank, self._is_alone = dist_.rank, dist_.world_size == 1
        self._numbers = torch.zeros(COUNT)
        self._work: dist.Work | None = None

    def start(self, loss: Tensor, values: Sequence[float]) -> None:
        bad = 0.0 if math.isfinite(loss) else self._rank + 1.0
        self._numbers = torch.tensor((bad, *values))
        if not self._is_alone:
            self._work = dist.all_reduce(self._numbers, dist.ReduceOp.MAX, async_op=True)

    def finish(self) -> Sequence[float]:
        if self._work is not None:
            self._work.wait()
        return self._numbers.tolist()


class GpuMaxima:
    """An all-reduce on a stream of its own.

    The host waits for the end of the forward pass while the backward pass keeps the device busy, and no
    kernel queue runs dry.
    """

    def __init__(self, dist_: Dist) -> None:
        self._is_alone = dist_.world_size == 1
        self._numbers = torch.zeros(COUNT, device=dist_.device)
        self._on_host = torch.zeros(COUNT, pin_memory=True)
        self._bad = torch.tensor(dist_.rank + 1.0, device=dist_.device)
        self._good = torch.tensor(0.0, device=dist_.device)
        self._stream, self._done = torch.cuda.Stream(dist_.device), torch.cuda.Event()

    def start(self, loss: Tensor, values: Sequence[float]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            fill(self._numbers, loss, (self._good, self._bad), values)
            if not self._is_alone:
                work = dist.all_reduce(self._numbers, dist.ReduceOp.MAX, async_op=True)
                assert work is not None
                work.wait()  # makes this stream wait, not the host
            self._on_host.copy_(self._numbers, non_blocking=True)
            self._done.record()
        loss.record_stream(self._stream)

    def finish(self) -> Sequence[float]:
        self._done.synchronize()
        return self._on_host.tolist()


def fill(numbers: Tensor, loss: Tensor, good_bad: tuple[Tensor, Tensor], values: Sequence[float]) -> None:
    """Fill `numbers` without a copy from the host."""
    first, *others = numbers.unbind()
    torch.where(torch.isfinite(loss), *good_bad, out=first)
    # fill_ passes the number with the launch. `numbers[1] = number` in torch before 2.15 copies it from the
    # host and waits, on a stream that waits for the forward pass: the queue runs dry.
    for number, value in zip(others, values, strict=True):
        number.fill_(value)
