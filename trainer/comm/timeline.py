"""When each bucket of gradients was ready, moved and done, and which rank was the last to have it.

A rank that comes late makes the all-reduce of all the others look long. An all-reduce ends on all ranks at
about the same time. So the rank whose bucket was ready the shortest time before its end was the last, and no
clocks need be compared. A lateness below the time of one message is noise.
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

_KEPT = 100  # passes, for the medians of `Timeline.measured`
_COLOURS = {"queued": "#9aa0a6", "overlapped": "#4c78a8", "exposed": "#e45756"}
_INK = "#8a8a8a"  # of text and axes, on a transparent page: readable in light and in dark
ReadGpu = Callable[[bool], tuple[float, ...] | None]


class GpuClock:
    """Marks points on streams with events, and reads them later, when the GPU has passed them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.restart()

    def restart(self) -> None:
        """Count from now on; called between passes at times, since events count in single precision."""
        self._origin = self.mark()

    def mark(self) -> Any:
        """Mark the end of the work now on the current stream."""
        event = accelerator.event(self.device, timing=True)
        event.record(accelerator.current_stream(self.device))
        return event

    def times(self, *marks: Any) -> ReadGpu:
        """A function that returns the marks' times, or None if one has not passed and it may not wait."""
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
    """One bucket of one backward pass; times are seconds of this rank's clock."""

    index: int
    num_bytes: int
    ready: float
    start: float = 0.0  # when this rank began to move it
    end: float = 0.0
    read_gpu: ReadGpu | None = None  # if a GPU has the times: see GpuClock

    @property
    def label(self) -> str:
        return f"bucket {self.index}, {self.num_bytes / 2**20:.3g} MiB"

    def fetch_times(self, wait: bool) -> bool:
        """Fetch the times if a GPU has them; return False if they are not known yet and `wait` is false."""
        if self.read_gpu is not None:
            times = self.read_gpu(wait)
            if times is None:
                return False
            self.ready, self.start, self.end = times
            self.read_gpu = None
        return True


@dataclass(slots=True)
class PassSum:
    """Communication summed over passes; overlapped + exposed = total."""

    count: int = 0
    total_s: float = 0.0  # in which some bucket was moving
    exposed_s: float = 0.0  # part of it when all buckets were ready: nothing was left to compute

    def add(self, records: Sequence[BucketRecord]) -> None:
        """Add the buckets of one pass; times at which several move count once."""
        last_ready = max(record.ready for record in records)
        counted_to = float("-inf")
        for record in sorted(records, key=lambda record: record.start):
            begin = max(record.start, counted_to)
            self.total_s += max(0.0, record.end - begin)
            self.exposed_s += max(0.0, record.end - max(begin, last_ready))
            counted_to = max(counted_to, record.end)
        self.count += 1

    def means_ms(self) -> dict[str, float]:
        """Per pass: total, overlapped and exposed."""
        total, exposed = (1e3 * seconds / self.count for seconds in (self.total_s, self.exposed_s))
        return {"total_ms": total, "overlapped_ms": total - exposed, "exposed_ms": exposed}


class Timeline:
    """Collects the records of one rank: some microseconds per bucket; only `metrics` communicates.

    Args:
        gpu_clock: if buckets are on a GPU.
        facts: added to `measured`; None for a user's hook, whose messages need not be its buckets.
    """

    def __init__(self, gpu_clock: GpuClock | None, facts: Mapping[str, Any] | None) -> None:
        self._gpu_clock, self._facts, self._own = gpu_clock, facts, dist.get_rank()
        self.num_passes = 0  # backward passes begun
        self.last_pass: list[BucketRecord] = []  # the last one finished and summed up
        self._kept: deque[list[BucketRecord]] = deque(maxlen=_KEPT)  # the newest passes
        self._waiting: deque[list[BucketRecord]] = deque()
        self.is_complete = True
        self._passes, self._recent = PassSum(), PassSum()  # of the run; since the last call of metrics
        self._waits: torch.Tensor | None = None  # (rank, bucket): seconds from ready to end, at that call
        self._times_last: Counter[int] = Counter()  # how often each rank was last at a call of metrics

    def arrive(self, index: int, num_bytes: int, is_last: bool) -> BucketRecord:
        """Record that a bucket is ready. The mover fills in the rest of the record."""
        if self.is_complete:
            self._sum_up(wait=False)
            self._waiting.append([])
            self.num_passes += 1
        self.is_complete = is_last
        record = BucketRecord(index, num_bytes, time.perf_counter())
        self._waiting[-1].append(record)
        return record

    def metrics(self) -> dict[str, float]:
        """Means per backward pass since the last call, and who was late in the last; {} if there were none.

        A collective of the model's ranks, called between backward passes.
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
            "comm/arrival_skew_ms": 1e3 * skew_s,
            "comm/last_rank": float(last_rank),
            **{f"comm/{name}": value for name, value in recent.means_ms().items()},
            "comm/megabytes": sum(record.num_bytes for record in self.last_pass) / 1e6,
        }

    def _latest(self, waits: torch.Tensor) -> tuple[int, float]:
        """The rank that was last to have the bucket at which ranks are furthest apart, and by how much."""
        spread = waits.amax(0) - waits.amin(0)
        return int(waits[:, spread.argmax()].argmin()), float(spread.max())

    def measured(self) -> dict[str, Any]:
        """A typical backward pass on this rank, for result.json; {} if there was none.

        Medians over the newest passes: total, overlapped and exposed communication; for each bucket, in order
        in which they are ready, its bytes, and how long before the last one it was ready.
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
        """The whole run on this rank, in two lines; "" before the first pass."""
        self._sum_up(wait=True)
        if self._passes.count == 0:
            return ""
        words = "{total_ms:.2f} ms, {overlapped_ms:.2f} overlapped and {exposed_ms:.2f} exposed"
        text = f"communication in a backward pass: {words.format(**self._passes.means_ms())}"
        for rank, times in self._times_last.most_common(1):
            text += f"\nlast to be ready: rank {rank}, {times} of {self._times_last.total()} times measured"
        return text

    def plots(self) -> dict[str, Figure]:
        """The last backward pass of this rank, a row per bucket, milliseconds.

        Grey: ready and queued; blue: moving during computation; red: moving without computation. A mark shows
        when the last rank had the bucket ready, at the last call of `metrics`.
        """
        from matplotlib.figure import Figure  # costs half a second, and only rank 0 draws

        records = self.last_pass
        # As narrow as TensorBoard's cards, which scale a wide figure down until nobody can read it.
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
            return {"comm/buckets": figure}
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
        return {"comm/buckets": figure}

    def _sum_up(self, wait: bool) -> None:
        """Sum up the complete passes whose times are known; with `wait`, all of them, waiting for the GPU."""
        while self._waiting and (len(self._waiting) > 1 or self.is_complete):
            records = self._waiting[0]
            if not all(record.fetch_times(wait) for record in records):
                return
            self.last_pass = self._waiting.popleft()
            self._kept.append(self.last_pass)
            self._passes.add(records)
            self._recent.add(records)
