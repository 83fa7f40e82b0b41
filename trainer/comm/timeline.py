"""Measure when each gradient bucket was ready, started and done, and which rank was the last to be ready.

A late rank makes the all-reduce of all other ranks look long. An all-reduce ends on all ranks at about the
same time, so the late rank is the one with the shortest time from the moment its bucket is ready to the end.
Therefore, clocks need not be compared. Differences smaller than the time of one message are noise.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainer import accelerator
from trainer.distributed.agreement import gather_objects

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUM_KEPT = 100  # passes over which `Timeline.measured` takes medians
_COLOURS = {"queued": "#9aa0a6", "overlapped": "#4c78a8", "exposed": "#e45756"}
_INK = "#8a8a8a"  # for text and axes, legible on light and dark pages, since the background is transparent
ReadGpu = Callable[[bool], tuple[float, ...] | None]


class GpuClock:
    """Records events on streams, and reads their times after the GPU has reached them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.restart()

    def restart(self) -> None:
        """Reset the origin between passes, because events measure time in single precision."""
        self._origin = self.mark()

    def mark(self) -> Any:
        """Record an event after the work that is on the current stream."""
        event = accelerator.event(self.device, timing=True)
        event.record(accelerator.current_stream(self.device))
        return event

    def times(self, *marks: Any) -> ReadGpu:
        """Return a function that returns the times in seconds, or None if they aren't known yet.

        With `wait`, the function waits until they are known.
        """
        origin = self._origin

        def read(wait: bool) -> tuple[float, ...] | None:
            if wait:
                for mark in marks:
                    mark.synchronize()
            if not all(mark.query() for mark in marks):
                return None
            return tuple(origin.elapsed_time(mark) / 1e3 for mark in marks)

        return read


@dataclass(slots=True)
class BucketRecord:
    """One bucket of one backward pass. Times are in seconds of this rank's clock."""

    index: int
    num_bytes: int
    ready: float
    start: float = 0.0  # when this rank started to send it
    end: float = 0.0
    read_gpu: ReadGpu | None = None  # set if the times are on a GPU; see GpuClock

    @property
    def label(self) -> str:
        return f"bucket {self.index}, {self.num_bytes / 2**20:.3g} MiB"

    def fetch_times(self, wait: bool) -> bool:
        """Fetch the times if a GPU recorded them. Return False if they are not ready and `wait` is false."""
        if self.read_gpu is not None:
            times = self.read_gpu(wait)
            if times is None:
                return False
            self.ready, self.start, self.end = times
            self.read_gpu = None
        return True


@dataclass(slots=True)
class PassSum:
    """The time of communication, summed over passes: the total is the overlapped and the exposed time."""

    count: int = 0
    total_s: float = 0.0  # while at least one bucket was being reduced
    exposed_s: float = 0.0  # the part after all buckets were ready, when nothing was left to compute

    def add(self, records: Sequence[BucketRecord]) -> None:
        """Add the buckets of one pass. Time during which several buckets are reduced counts once."""
        last_ready = max(record.ready for record in records)
        counted_to = float("-inf")
        for record in sorted(records, key=lambda record: record.start):
            begin = max(record.start, counted_to)
            self.total_s += max(0.0, record.end - begin)
            self.exposed_s += max(0.0, record.end - max(begin, last_ready))
            counted_to = max(counted_to, record.end)
        self.count += 1

    def means_ms(self) -> dict[str, float]:
        """Return the mean milliseconds per pass: total, overlapped and exposed."""
        total, exposed = (1e3 * seconds / self.count for seconds in (self.total_s, self.exposed_s))
        return {"total_ms": total, "overlapped_ms": total - exposed, "exposed_ms": exposed}


class Timeline:
    """Collects the records of one rank at a cost of microseconds per bucket; only `metrics` communicates.

    Args:
        gpu_clock: None if buckets are on the CPU.
        facts: entries to add to `measured`; None for a user's hook, which may send something other than the
            buckets.
    """

    def __init__(self, gpu_clock: GpuClock | None, facts: Mapping[str, Any] | None) -> None:
        self._gpu_clock, self._facts, self._own = gpu_clock, facts, dist.get_rank()
        self.num_passes = 0  # backward passes that have started
        self.last_pass: list[BucketRecord] = []  # the last pass that was added to the sums
        self._kept: deque[list[BucketRecord]] = deque(maxlen=_NUM_KEPT)  # the newest passes
        self._waiting: deque[list[BucketRecord]] = deque()
        self.is_complete = True
        self._passes, self._recent = PassSum(), PassSum()  # in the run; since the last call of metrics
        self._waits: torch.Tensor | None = None  # (rank, bucket): seconds from ready to end, at that call
        self._times_last: Counter[int] = Counter()  # by rank, the calls of metrics in which it was last

    def arrive(self, index: int, num_bytes: int, is_last: bool) -> BucketRecord:
        """Record that a bucket is ready; the caller sets the other times of the returned record."""
        if self.is_complete:
            self._sum_up(wait=False)
            self._waiting.append([])
            self.num_passes += 1
        self.is_complete = is_last
        record = BucketRecord(index, num_bytes, time.perf_counter())
        self._waiting[-1].append(record)
        return record

    def metrics(self) -> dict[str, float]:
        """Return mean times per backward pass since the previous call, and the slowest rank of the last pass.

        Call it between backward passes (a collective of the model's ranks). The result is {} if there was no
        pass.
        """
        self._sum_up(wait=True)
        if self._gpu_clock is not None:
            self._gpu_clock.restart()
        recent, self._recent = self._recent, PassSum()
        if recent.count == 0:
            return {}
        own = [record.end - record.ready for record in self.last_pass]
        self._waits = torch.tensor(gather_objects(own), dtype=torch.float64)
        last_rank, skew_s = self._latest(self._waits)
        self._times_last[last_rank] += 1
        return {
            "usage/comm/arrival_skew_ms": 1e3 * skew_s,
            "usage/comm/last_rank": float(last_rank),
            **{f"usage/comm/{name}": value for name, value in recent.means_ms().items()},
            "usage/comm/megabytes": sum(record.num_bytes for record in self.last_pass) / 1e6,
        }

    def _latest(self, waits: torch.Tensor) -> tuple[int, float]:
        """Return the last rank to be ready, and its delay in seconds, for the most delayed bucket."""
        spread = waits.amax(0) - waits.amin(0)
        return int(waits[:, spread.argmax()].argmin()), float(spread.max())

    def measured(self) -> dict[str, Any]:
        """Return medians over the newest backward passes of this rank, for result.json; {} without passes.

        They are the total, overlapped and exposed communication in milliseconds, and for each bucket, in the
        order in which buckets become ready, its size and how long before the last bucket it was ready.
        """
        self._sum_up(wait=True)
        layout = [(record.index, record.num_bytes) for record in self.last_pass]
        alike = [own for own in self._kept if [(r.index, r.num_bytes) for r in own] == layout]
        if self._facts is None or not alike:
            return {}
        costs = []
        for records in alike:
            cost = PassSum()
            cost.add(records)
            costs.append(cost.means_ms())
        ends = [max(record.ready for record in records) for records in alike]
        buckets = [
            {
                "bytes": same[0].num_bytes,
                "early_ms": 1e3 * median(end - r.ready for end, r in zip(ends, same, strict=True)),
            }
            for same in zip(*alike, strict=True)
        ]
        medians = {name: median(cost[name] for cost in costs) for name in costs[0]}
        return {"timeline": {**self._facts, **medians, "buckets": buckets}}

    def summary(self) -> str:
        """Return two lines about the whole run on this rank, or "" before the first pass."""
        self._sum_up(wait=True)
        if self._passes.count == 0:
            return ""
        means = "{total_ms:.2f} ms ({overlapped_ms:.2f} ms overlapped, {exposed_ms:.2f} ms exposed)"
        text = f"communication per backward pass: {means.format(**self._passes.means_ms())}"
        for rank, times in self._times_last.most_common(1):
            text += f"\nslowest rank: {rank} (last in {times} of {self._times_last.total()} measured steps)"
        return text

    def plots(self) -> dict[str, Figure]:
        """Plot the last backward pass of this rank, with a row for each bucket and times in milliseconds."""
        from matplotlib.figure import Figure  # takes half a second to import, and only rank 0 plots

        records = self.last_pass
        # As narrow as a card in TensorBoard, which would scale a wide figure down until it is illegible.
        figure = Figure(figsize=(4.4, 2 + 0.32 * len(records)), layout="constrained", facecolor="none")
        axes = figure.add_subplot(facecolor="none")
        axes.set_xlabel("ms since the first bucket was ready", color=_INK)
        axes.set_title(f"rank {self._own}, backward pass {self.num_passes}", color=_INK)
        axes.set_yticks(range(len(records)), [record.label.removeprefix("bucket ") for record in records])
        axes.set_ylabel("bucket", color=_INK)
        axes.tick_params(colors=_INK)
        axes.spines[:].set_color(_INK)
        axes.invert_yaxis()
        if not records:
            return {"usage/comm/buckets": figure}
        origin, last_ready = records[0].ready, max(record.ready for record in records)
        moments = [(r.ready, r.start, min(r.end, max(r.start, last_ready)), r.end) for r in records]
        for number, (name, colour) in enumerate(_COLOURS.items()):
            left = [1e3 * (at[number] - origin) for at in moments]
            widths = [1e3 * max(0.0, at[number + 1] - at[number]) for at in moments]
            axes.barh(range(len(records)), widths, left=left, color=colour, label=name)
        if self._waits is not None and self._waits.shape[1] == len(records):
            late = (self._waits[self._own] - self._waits.amin(0)).tolist()
            last = [1e3 * (r.ready - origin + late_s) for r, late_s in zip(records, late, strict=True)]
            rank, skew_s = self._latest(self._waits)
            label = f"rank {rank} ready, {1e3 * skew_s:.3g} ms late"
            axes.scatter(last, range(len(records)), marker="|", s=160, color=_INK, zorder=3, label=label)
        figure.legend(loc="outside lower left", ncols=2, frameon=False, labelcolor=_INK)
        return {"usage/comm/buckets": figure}

    def _sum_up(self, wait: bool) -> None:
        while self._waiting and (len(self._waiting) > 1 or self.is_complete):
            records = self._waiting[0]
            if not all(record.fetch_times(wait) for record in records):
                return
            self.last_pass = self._waiting.popleft()
            self._kept.append(self.last_pass)
            self._passes.add(records)
            self._recent.add(records)
