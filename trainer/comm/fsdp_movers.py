"""Moves the blocks of FSDP's units in the order of the calls: on a thread on CPUs, on a stream on GPUs."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.futures import Future

from trainer.comm.algorithms.schedule import Collective
from trainer.comm.timeline.gpu_clock import GpuClock
from trainer.comm.timeline.records import BucketRecord, Timeline
from trainer.comm.transport.bucket_layout import DTYPES
from trainer.comm.transport.executor import CpuExecutor
from trainer.comm.transport.members import Members
from trainer.comm.transport.nccl import NcclReducer
from trainer.comm.transport.worker import Worker


def own_block(buffer: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's block of `buffer`."""
    return buffer.view(dist.get_world_size(group), -1)[dist.get_rank(group)]


class OnCpu:
    """Moves blocks on its own thread, in the order of the calls."""

    def __init__(
        self,
        executors: Mapping[Collective, CpuExecutor],
        group: dist.ProcessGroup,
        algorithm: str,
        timeline: Timeline,
    ) -> None:
        self._executors, self._group, self._algorithm = executors, group, algorithm
        self._members, self._timeline = Members(group), timeline
        self._worker = Worker(self._move, self._close)
        self._scattering: tuple[_Pending, torch.Tensor, int] | None = None

    def gather(self, number: int, buffer: torch.Tensor, record: BucketRecord) -> dist.Work:
        run = partial(self._executors[Collective.ALL_GATHER].run, _as_known(buffer), number=number)
        return self._submit(run, record)

    def scatter(
        self, number: int, output: torch.Tensor, buffer: torch.Tensor, mean: bool, record: BucketRecord
    ) -> None:
        self.finish()  # only one unit's gradients wait in memory, as with torch's own
        divisor, version = len(self._members.ranks) if mean else 1, output._version

        def run() -> dict[int, float]:
            waited_s = self._executors[Collective.REDUCE_SCATTER].run(buffer, divisor, number)
            output.copy_(own_block(buffer, self._group))
            return waited_s

        self._scattering = self._submit(run, record), output, version + 1

    def finish(self) -> None:
        """Wait for the last reduce-scatter.

        Raises:
            RuntimeError: its output was written to meanwhile, as a hook of `set_all_reduce_hook` may do.
        """
        if self._scattering is not None:
            pending, output, version = self._scattering
            self._scattering = None
            pending.wait()
            if output._version != version:
                raise RuntimeError(f"the result of the {pending.label} was written to before it had come")

    def close(self) -> None:
        self._worker.close()

    def _submit(self, run: Callable[[], dict[int, float]], record: BucketRecord) -> "_Pending":
        return _Pending(self._worker.put(run, record), record)

    def _move(self, run: Callable[[], dict[int, float]], record: BucketRecord) -> torch.Tensor:
        passes = self._timeline.num_passes
        with self._members.named(f"the {record.label} ({self._algorithm}) in pass {passes}"):
            record.waited_s = self._members.in_world(run())
        return torch.empty(0)

    def _close(self) -> None:
        for executor in self._executors.values():
            executor.close()


class _Pending(dist.Work):
    """A collective to wait for; the time waited is added to `record`."""

    def __init__(self, future: Future[torch.Tensor], record: BucketRecord) -> None:
        super().__init__()
        self._future, self._record, self.label = future, record, record.label
        record.blocked_s = 0.0

    def wait(self, timeout: object = None) -> bool:
        """Raises CommError if the collective cannot finish before the executor's deadline."""
        began = time.perf_counter()
        self._future.wait()
        assert self._record.blocked_s is not None
        self._record.needed = self._record.needed or began
        self._record.blocked_s += time.perf_counter() - began
        return True


class OnGpu:
    """Launches on the executors' stream; only streams wait."""

    def __init__(
        self, executors: Mapping[Collective, NcclReducer], group: dist.ProcessGroup, clock: GpuClock
    ) -> None:
        self._executors, self._group, self._clock = executors, group, clock

    def gather(self, number: int, buffer: torch.Tensor, record: BucketRecord) -> dist.Work:
        marks = self._executors[Collective.ALL_GATHER].launch(_as_known(buffer), 1, number)
        return _OnStream(self._clock, marks, record)

    def scatter(
        self, number: int, output: torch.Tensor, buffer: torch.Tensor, mean: bool, record: BucketRecord
    ) -> None:
        executor, divisor = self._executors[Collective.REDUCE_SCATTER], dist.get_world_size(self._group)
        ready, start, _ = executor.launch(buffer, divisor if mean else 1, number)
        output.record_stream(executor.stream)
        with torch.cuda.stream(executor.stream):
            output.copy_(own_block(buffer, self._group))
            end = self._clock.mark()
        torch.cuda.current_stream(self._clock.device).wait_event(end)
        record.read_gpu = self._clock.times(ready, start, end)

    def finish(self) -> None:
        """Nothing to wait for: the computation's stream waits for that of `scatter`."""

    def close(self) -> None:
        """Nothing to end: this class has no thread."""


class _OnStream(dist.Work):
    """Work for which the current stream waits; the time at which the stream did so is added to `record`."""

    def __init__(self, clock: GpuClock, marks: Sequence[torch.cuda.Event], record: BucketRecord) -> None:
        super().__init__()
        self._clock, self._marks, self._record = clock, marks, record
        record.read_gpu = clock.times(*marks)

    def wait(self, timeout: object = None) -> bool:
        self._record.read_gpu = self._clock.times(*self._marks, self._clock.mark())
        torch.cuda.current_stream(self._clock.device).wait_event(self._marks[-1])
        return True


def _as_known(buffer: torch.Tensor) -> torch.Tensor:
    """`buffer`, as bytes if no gradient has its dtype: gathered data is never added."""
    return buffer if buffer.dtype in DTYPES else buffer.view(torch.uint8)
