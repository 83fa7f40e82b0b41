"""Predicts a training step on other hosts and links, from what a run measured.

A step is its computing time plus the communication that does not overlap with it, plus, on CPUs, what the
processors spend on communication that is. A run with strategy=ddp stores in result.json how long a step
takes, and how long before the last gradient of a backward pass each bucket is ready. One bucket moves at a
time, in the order in which they are ready; what moves after the last gradient is exposed. The computing time
is that of the run: each process has the same batch, and the same share of a processor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planner import entries
from planner.cost_model import Machine
from planner.world import FP32, PlannedWorld
from trainer.comm.algorithms.all_reduce import ALGORITHMS

_ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
_LIKE = {"native": "ring"}  # gloo's and NCCL's own all-reduces of long buckets are rings


@dataclass(frozen=True)
class BucketTiming:
    numel: int  # fp32 elements
    early_s: float  # ready this much before the last gradient


@dataclass(frozen=True)
class PredictedStep:
    """Seconds of one step: computing, exposed communication, and the slowdown of computing, added up."""

    computed_s: float
    overlapped_s: float
    exposed_s: float
    slowed_s: float  # by the processors that move overlapped communication

    @property
    def seconds(self) -> float:
        return self.computed_s + self.exposed_s + self.slowed_s


@dataclass(frozen=True)
class MeasuredRun:
    """What a run directory records of its steps."""

    step_s: float
    exposed_s: float
    buckets: Sequence[BucketTiming]
    algorithm: str
    hosts: Sequence[int]  # of every rank
    itemsize: int  # bytes on the wire
    on_cpu: bool

    @property
    def title(self) -> str:
        return f"{len(self.hosts)} processes on {max(self.hosts) + 1} hosts, comm={self.algorithm}"

    @property
    def num_bytes(self) -> int:
        return FP32 * sum(bucket.numel for bucket in self.buckets)

    def computed_s(self, machine: Machine | None) -> float:
        """The time of a step without communication.

        Of the exposed time, only as much counts as communication as the links of the run explain, if they are
        known: the rest is waiting for late ranks, as on any hosts.

        Args:
            machine: that of the run; None if unknown.

        Raises:
            ValueError: links and processors of this machine explain more than the whole step.
        """
        exposed_s, slowed_s = self.exposed_s, 0.0
        if machine is not None:
            num_hosts = max(self.hosts) + 1
            world = PlannedWorld(num_hosts, len(self.hosts) // num_hosts, machine, self.itemsize)
            like = self.step(world, self.algorithm, 0.0)
            exposed_s, slowed_s = min(exposed_s, like.exposed_s), like.slowed_s
        computed_s = self.step_s - exposed_s - slowed_s
        if computed_s <= 0:
            raise ValueError(
                f"a step took {self.step_s * 1e3:g} ms, but its communication alone would take "
                f"{(exposed_s + slowed_s) * 1e3:g} ms by these links: no time is left for computing; "
                "train for longer, or give --from a preflight of the hosts of this run"
            )
        return computed_s

    def step(self, world: PlannedWorld, algorithm: str, computed_s: float) -> PredictedStep:
        """Predict a step on these hosts, with the buckets of this run."""
        moved = [world.all_reduce(algorithm, bucket.numel) for bucket in self.buckets]
        total_s, processors_s = sum(one.seconds for one in moved), sum(one.processors_s for one in moved)
        done_s = float("-inf")  # when the last one has moved, with the last gradient at 0
        for bucket, one in zip(self.buckets, moved, strict=True):
            done_s = max(done_s, -bucket.early_s) + one.seconds
        exposed_s = min(total_s, max(0.0, done_s))
        overlapped_s = total_s - exposed_s
        slowed_s = slowdown_s(world, overlapped_s, total_s, processors_s) if self.on_cpu else 0.0
        return PredictedStep(computed_s, overlapped_s, exposed_s, slowed_s)

    def steps(self, world: PlannedWorld, computed_s: float) -> dict[str, PredictedStep]:
        """By algorithm, fastest first."""
        found = {name: self.step(world, name, computed_s) for name in ALGORITHMS}
        return dict(sorted(found.items(), key=lambda item: item[1].seconds))


def slowdown_s(world: PlannedWorld, overlapped_s: float, total_s: float, processors_s: float) -> float:
    """What overlapped communication adds to computing on the same processors.

    Args:
        overlapped_s: how much of the communication's `total_s` is overlapped.
        processors_s: the time that a host's processors are busy with all of it.
    """
    computing = min(1.0, world.per_host / world.machine.parallelism)  # of a host's processors
    return overlapped_s * min(1.0, processors_s / total_s) * computing if total_s > 0 else 0.0


def read(run_dir: Path) -> MeasuredRun:
    """Raises OSError; ValueError if a plan cannot use the run in `run_dir`, with the requirements."""
    result = entries.read(run_dir / "result.json")
    if not result.values.get("timeline"):
        raise ValueError(
            "its result.json has no timeline: train with two or more processes and strategy=ddp, "
            "comm.timeline=true and any comm except hook (--servers, without --train, predicts the "
            "exchange with parameter servers)"
        )
    timeline = result.mapping("timeline")
    algorithm = _LIKE.get(result.take("comm", str), result.take("comm", str))
    if algorithm not in ALGORITHMS:
        raise ValueError(f"comm={algorithm} is not one of {', '.join(ALGORITHMS)}")
    hosts, buckets = timeline.take("hosts", list), timeline.mappings("buckets")
    if not hosts or set(hosts) != set(range(max(hosts) + 1)):
        raise ValueError(f"timeline.hosts is {hosts}, but must be each rank's host, from 0 without gaps")
    if not buckets:
        timeline.refuse("buckets", "a list of at least one bucket")
    if (wire_dtype := timeline.take("wire_dtype", str)) not in _ITEMSIZE:
        timeline.refuse("wire_dtype", f"one of {', '.join(_ITEMSIZE)}")
    return MeasuredRun(
        step_s=entries.number(result, "ms_per_step", positive=True) / 1e3,
        exposed_s=entries.number(timeline, "exposed_ms") / 1e3,
        buckets=[_bucket(bucket) for bucket in buckets],
        algorithm=algorithm,
        hosts=hosts,
        itemsize=_ITEMSIZE[wire_dtype],
        on_cpu=timeline.take("device", str) == "cpu",
    )


def _bucket(bucket: entries.Fields) -> BucketTiming:
    return BucketTiming(max(1, bucket.take("bytes", int) // FP32), entries.number(bucket, "early_ms") / 1e3)
