"""The largest of each number over all ranks, once in a step, while the backward pass runs."""

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed.process_group import Dist
from trainer.faults.heartbeat import Records
from trainer.faults.shown_numbers import COUNT

_YIELDS, _SLEEP_S = 20, 2e-4


class SilentRankError(TimeoutError):
    """A rank has not shown its numbers; `peer` tells the watch whom this one waited for."""

    def __init__(self, peer: int, timeout_s: float) -> None:
        super().__init__(f"rank {peer} has not agreed on the next update within {timeout_s:g} s")
        self.peer = peer


class Maxima(Protocol):
    """`start` and `finish` take turns, on every rank the same number of times."""

    def start(self, loss: Tensor, values: Sequence[float]) -> None:
        """Send COUNT numbers: `rank + 1`, or 0 if `loss` (a detached scalar) is finite, and `values`."""

    def finish(self) -> Sequence[float]:
        """Wait for the numbers of all ranks; return the largest of each.

        Raises:
            SilentRankError: a rank has not sent its numbers in time; only through shared memory.
        """


def maxima_over(dist_: Dist) -> Maxima:
    """The quickest way that reaches all ranks (a collective)."""
    if dist_.device.type == "cuda":
        return GpuMaxima(dist_)
    others = dist_.watch.others_here() if dist_.watch is not None else {}
    if dist_.world_size > 1:
        # If one rank cannot read the others' memory, as from another container, none does.
        can_read = torch.tensor(float(len(others) == dist_.world_size - 1))
        dist.all_reduce(can_read, dist.ReduceOp.MIN)
        if not can_read:
            return MessageMaxima(dist_.rank)
    return SharedMemoryMaxima(dist_, others)


class SharedMemoryMaxima:
    """For ranks of one host, on CPUs, or one alone: each shows its numbers, and reads the others' later.

    An all-reduce of gloo wakes two threads on each rank: without it, a step of two ranks takes 0.91 of the
    processor time (MLP on the digits). Waits are short: a rank shows its numbers before its backward pass,
    and the others read them after theirs, in which most strategies wait for its gradients.

    Two slots are enough. A rank writes the slot of turn n + 2 after it has finished turn n + 1, for which all
    others have shown their numbers, after they had finished turn n.
    """

    def __init__(self, dist_: Dist, others: Mapping[int, Records]) -> None:
        self._heartbeat, self._rank, self._others = dist_.heartbeat, dist_.rank, others
        self._timeout_s = dist_.watch.timeout_s if dist_.watch is not None else math.inf
        self._own: Sequence[float] = ()

    def start(self, loss: Tensor, values: Sequence[float]) -> None:
        bad = 0.0 if math.isfinite(loss) else self._rank + 1.0
        self._own = (bad, *values)
        if self._others:
            self._heartbeat.show(self._own)

    def finish(self) -> Sequence[float]:
        if not self._others:
            return self._own
        shown = [self._own, *(self._shown_by(rank, records) for rank, records in self._others.items())]
        return [max(numbers) for numbers in zip(*shown, strict=True)]

    def _shown_by(self, rank: int, records: Records) -> Sequence[float]:
        """Wait until `rank` has shown its numbers. The watch ends the process if that rank has died."""
        turn = self._heartbeat.turn
        begin, looks = time.monotonic(), 0
        while (numbers := records.shown(turn)) is None:
            looks += 1
            if looks < _YIELDS:
                os.sched_yield()
            elif time.monotonic() - begin < self._timeout_s:
                time.sleep(_SLEEP_S)
            else:
                raise SilentRankError(rank, self._timeout_s)
        return numbers


class MessageMaxima:
    """For ranks of several hosts, on CPUs: an all-reduce, hidden behind the backward pass."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._numbers = torch.zeros(COUNT)
        self._work: dist.Work | None = None

    def start(self, loss: Tensor, values: Sequence[float]) -> None:
        bad = 0.0 if math.isfinite(loss) else self._rank + 1.0
        self._numbers = torch.tensor((bad, *values))
        self._work = dist.all_reduce(self._numbers, dist.ReduceOp.MAX, async_op=True)

    def finish(self) -> Sequence[float]:
        assert self._work is not None
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
