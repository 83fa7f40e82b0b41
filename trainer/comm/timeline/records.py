"""When each bucket was ready, moved and done, and which ranks this rank waited for.

A rank that comes late makes the all-reduce of all the others look long. So lateness is measured at its
source: the time at which each rank's bucket was ready, on a common clock.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from trainer.comm.timeline.clock import CommonClock
from trainer.comm.timeline.gpu_clock import GpuClock

_KEPT = 100  # passes, for the medians of `Timeline.typical_pass`


@dataclass(slots=True)
class BucketRecord:
    """One bucket of one backward pass; times are seconds of `time.perf_counter`."""

    index: int
    num_bytes: int
    ready: float
    start: float = 0.0  # when this rank began to move it
    end: float = 0.0
    waited_s: dict[int, float] = field(default_factory=dict)  # by neighbour
    read_gpu: Callable[[bool], tuple[float, ...] | None] | None = None  # see gpu_clock.times

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
    """Communication summed over passes; hidden + exposed = total."""

    count: int = 0
    total_s: float = 0.0  # in which some bucket was moving
    exposed_s: float = 0.0  # part of it when all buckets were ready: nothing was left to compute
    waited_s: float = 0.0  # for neighbours

    @property
    def hidden_s(self) -> float:
        return self.total_s - self.exposed_s

    def add(self, records: Sequence[BucketRecord]) -> None:
        """Add the buckets of one pass; times at which several move count once."""
        last_ready = max(record.ready for record in records)
        counted_to = 0.0
        for record in sorted(records, key=lambda record: record.start):
            begin = max(record.start, counted_to)
            self.total_s += max(0.0, record.end - begin)
            self.exposed_s += max(0.0, record.end - max(begin, last_ready))
            self.waited_s += sum(record.waited_s.values())
            counted_to = max(counted_to, record.end)
        self.count += 1


@dataclass(frozen=True)
class Arrivals:
    """When the buckets of one backward pass were ready on each of `ranks`, by the clock of the first.

    `ready` is (rank, bucket); `ranks` are the global ranks of its rows.
    """

    ready: torch.Tensor
    ranks: Sequence[int]

    @property
    def skew_s(self) -> float:
        """From the first rank to the last, at the bucket that waited longest."""
        return float((self.ready.amax(0) - self.ready.amin(0)).max())

    @property
    def last_rank(self) -> int:
        spread = self.ready.amax(0) - self.ready.amin(0)
        return self.ranks[int(self.ready[:, spread.argmax()].argmax())]


@dataclass(slots=True)
class BucketSum:
    """One bucket's records of a run, summed up."""

    count: int = 0
    num_bytes: int = 0
    queued_s: float = 0.0
    moved_s: float = 0.0
    waited_s: dict[int, float] = field(default_factory=dict)

    def add(self, record: BucketRecord) -> None:
        self.count += 1
        self.num_bytes += record.num_bytes
        self.queued_s += record.start - record.ready
        self.moved_s += record.end - record.start
        for peer, seconds in record.waited_s.items():
            self.waited_s[peer] = self.waited_s.get(peer, 0.0) + seconds


class Timeline:
    """Collects the records of one rank: some microseconds per bucket; only `metrics` communicates.

    Args:
        group: a gloo group of the model's ranks, idle between backward passes.
        hosts: host index of each of them; ranks of one host share its clock.
        gpu_clock: if buckets are on a GPU.
    """

    def __init__(
        self, group: dist.ProcessGroup, hosts: Sequence[int], gpu_clock: GpuClock | None = None
    ) -> None:
        self.ranks = dist.get_process_group_ranks(group)  # global ranks, here and below
        self.rank = self.ranks[dist.get_rank(group)]
        self.num_passes = 0  # backward passes begun
        self.last_pass: list[BucketRecord] = []  # the last one finished and summed up
        self.arrivals: Arrivals | None = None  # from the last call of metrics
        self.buckets: dict[tuple[int, int], BucketSum] = {}  # over the run, by (index, bytes)
        self.passes = PassSum()  # over the run
        self._kept: deque[list[BucketRecord]] = deque(maxlen=_KEPT)  # the newest passes
        self.times_last: dict[int, int] = {}  # how often each rank was last at a call of metrics
        self._clock, self._gpu_clock = CommonClock(group, hosts), gpu_clock
        self._recent = PassSum()  # since the last call of metrics
        self._waiting: deque[list[BucketRecord]] = deque()
        self._complete = True  # the newest pass has its last bucket

    def __getstate__(self) -> dict[str, Any]:
        """For pickling to another rank: without clocks and passes that are not summed up."""
        return {**vars(self), "_clock": None, "_gpu_clock": None, "_waiting": deque()}

    def arrive(self, index: int, num_bytes: int, is_last: bool) -> BucketRecord:
        """Record that a bucket is ready. The mover fills in the rest of the record."""
        if self._complete:
            self.sum_up(wait=False)
            self._waiting.append([])
            self.num_passes += 1
        self._complete = is_last
        record = BucketRecord(index, num_bytes, time.perf_counter())
        self._waiting[-1].append(record)
        return record

    def metrics(self) -> dict[str, float]:
        """Means per backward pass since the last call and the arrivals of the last; {} if there were none.

        A collective of the model's ranks, called between backward passes: compares clocks, gathers stamps.
        """
        self.sum_up(wait=True)
        if self._gpu_clock is not None:
            self._gpu_clock.synchronize()
        recent, self._recent = self._recent, PassSum()
        if recent.count == 0:
            return {}
        ready = [record.ready for record in self.last_pass]
        self.arrivals = arrivals = Arrivals(self._clock.gather(ready), self.ranks)
        self.times_last[arrivals.last_rank] = self.times_last.get(arrivals.last_rank, 0) + 1
        return {
            "comm/arrival_skew_ms": 1e3 * arrivals.skew_s,
            "comm/last_rank": float(arrivals.last_rank),
            "comm/total_ms": 1e3 * recent.total_s / recent.count,
            "comm/hidden_ms": 1e3 * recent.hidden_s / recent.count,
            "comm/exposed_ms": 1e3 * recent.exposed_s / recent.count,
            "comm/waited_ms": 1e3 * recent.waited_s / recent.count,
            "comm/megabytes": sum(record.num_bytes for record in self.last_pass) / 1e6,
        }

    def typical_pass(self) -> dict[str, Any]:
        """A typical backward pass on this rank, for result.json; {} if there was none.

        Medians over the newest passes: total, hidden and exposed communication; for each bucket in the order
        in which they are ready, its bytes, and how long before the last one it was ready.
        """
        self.sum_up(wait=True)
        layout = [(record.index, record.num_bytes) for record in self.last_pass]
        alike = [own for own in self._kept if [(r.index, r.num_bytes) for r in own] == layout]
        if not alike:
            return {}
        sums = [PassSum() for _ in alike]
        for records, own in zip(alike, sums, strict=True):
            own.add(records)
        ends = [max(record.ready for record in records) for records in alike]
        return {
            "total_ms": 1e3 * median(own.total_s for own in sums),
            "hidden_ms": 1e3 * median(own.hidden_s for own in sums),
            "exposed_ms": 1e3 * median(own.exposed_s for own in sums),
            "buckets": [
                {
                    "bytes": same[0].num_bytes,
                    "early_ms": 1e3 * median(end - r.ready for end, r in zip(ends, same, strict=True)),
                }
                for same in zip(*alike, strict=True)
            ],
        }

    def sum_up(self, wait: bool) -> None:
        """Sum up the complete passes whose times are known; with `wait`, all of them, waiting for the GPU."""
        while self._waiting and (len(self._waiting) > 1 or self._complete):
            records = self._waiting[0]
            if not all(record.fetch_times(wait) for record in records):
                return
            self.last_pass = self._waiting.popleft()
            self._kept.append(self.last_pass)
            for record in records:
                self.buckets.setdefault((record.index, record.num_bytes), BucketSum()).add(record)
            for sums in (self.passes, self._recent):
                sums.add(records)
