"""Predict a training step on other hosts and links, from the measurements of a run.

The time of a step is its computing time, plus exposed communication, plus, on CPUs, the time that processors
spend on overlapped communication. A run with strategy=ddp stores in result.json how long a step takes, and
for each bucket how long before the end of the backward pass it is ready. Buckets are reduced one at a time,
in the order in which they become ready; communication after the last gradient is exposed. The computing time
is that of the run, because each process has the same batch size and the same fraction of a processor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planner import entries
from planner.cost_model import Machine
from planner.world import FP32, PlannedWorld
from trainer.comm.algorithms.all_reduce import ALGORITHMS

_ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
_SIMILAR = {"native": "ring"}  # gloo and NCCL use a ring for long buckets


@dataclass(frozen=True)
class BucketTiming:
    """A bucket of gradients, and when it is ready."""

    numel: int  # fp32 elements
    early_s: float  # time from when it is ready to the last gradient


@dataclass(frozen=True)
class PredictedStep:
    """The times of a step in seconds."""

    computed_s: float
    overlapped_s: float
    exposed_s: float
    slowed_s: float  # slowdown of computing by overlapped communication on the same processors

    @property
    def seconds(self) -> float:
        return self.computed_s + self.exposed_s + self.slowed_s


@dataclass(frozen=True)
class MeasuredRun:
    """The measurements of steps in a run directory."""

    step_s: float
    exposed_s: float
    buckets: Sequence[BucketTiming]
    algorithm: str
    hosts: Sequence[int]  # the host of every rank
    itemsize: int  # bytes on the wire
    on_cpu: bool

    @property
    def title(self) -> str:
        hosts = max(self.hosts) + 1
        return f"{len(self.hosts)} processes on {hosts} host{'s'[: hosts > 1]}, comm={self.algorithm}"

    @property
    def num_bytes(self) -> int:
        return FP32 * sum(bucket.numel for bucket in self.buckets)

    def computed_s(self, machine: Machine | None) -> float:
        """Return the time of a step without communication.

        If the machine of the run is known, only the exposed time that its links explain is subtracted. The
        rest is time spent waiting for late ranks, which is expected on any hosts.

        Args:
            machine: the machine of the run; None if unknown.

        Raises:
            ValueError: the communication on this machine would take longer than the whole step.
        """
        exposed_s, slowed_s = self.exposed_s, 0.0
        if machine is not None:
            num_hosts = max(self.hosts) + 1
            world = PlannedWorld(num_hosts, len(self.hosts) // num_hosts, machine, self.itemsize)
            predicted = self.step(world, self.algorithm, 0.0)
            exposed_s, slowed_s = min(exposed_s, predicted.exposed_s), predicted.slowed_s
        computed_s = self.step_s - exposed_s - slowed_s
        if computed_s <= 0:
            raise ValueError(
                f"a step took {self.step_s * 1e3:g} ms, but its communication alone would take "
                f"{(exposed_s + slowed_s) * 1e3:g} ms on these links, which leaves no time for computing; "
                "train for longer, or use --from with a preflight of the hosts of this run"
            )
        return computed_s

    def step(self, world: PlannedWorld, algorithm: str, computed_s: float) -> PredictedStep:
        """Predict a step on these hosts, with the buckets of this run."""
        costs = [world.all_reduce(algorithm, bucket.numel) for bucket in self.buckets]
        total_s, processors_s = sum(cost.seconds for cost in costs), sum(cost.processors_s for cost in costs)
        done_s = float("-inf")  # the end of the last all-reduce, relative to the last gradient
        for bucket, cost in zip(self.buckets, costs, strict=True):
            done_s = max(done_s, -bucket.early_s) + cost.seconds
        exposed_s = min(total_s, max(0.0, done_s))
        overlapped_s = total_s - exposed_s
        slowed_s = slowdown_s(world, overlapped_s, total_s, processors_s) if self.on_cpu else 0.0
        return PredictedStep(computed_s, overlapped_s, exposed_s, slowed_s)

    def steps(self, world: PlannedWorld, computed_s: float) -> dict[str, PredictedStep]:
        """Predict a step for each algorithm, fastest first."""
        by_name = {name: self.step(world, name, computed_s) for name in ALGORITHMS}
        return dict(sorted(by_name.items(), key=lambda item: item[1].seconds))


def slowdown_s(world: PlannedWorld, overlapped_s: float, total_s: float, processors_s: float) -> float:
    """Return the time by which overlapped communication delays computation on the same processors.

    Args:
        overlapped_s: the overlapped part of the communication's `total_s`.
        processors_s: time for which the communication, overlapped or not, keeps a host's processors busy.
    """
    computing = min(1.0, world.per_host / world.machine.parallelism)  # fraction of a host's processors
    return overlapped_s * min(1.0, processors_s / total_s) * computing if total_s > 0 else 0.0


def read(run_dir: Path) -> MeasuredRun:
    """Read the measurements of a run. Raise OSError, or ValueError if the run has no timeline."""
    result = entries.read(run_dir / "result.json")
    if not result.values.get("timeline"):
        raise ValueError(
            "its result.json has no timeline; train with two or more processes, strategy=ddp, "
            "comm.timeline=true, and any comm except hook (for parameter servers, use --servers without "
            "--train)"
        )
    timeline = result.mapping("timeline")
    algorithm = _SIMILAR.get(result.take("comm", str), result.take("comm", str))
    if algorithm not in ALGORITHMS:
        raise ValueError(f"comm={algorithm}: expected one of {', '.join(ALGORITHMS)}")
    hosts, buckets = timeline.take("hosts", list), timeline.mappings("buckets")
    if not hosts or set(hosts) != set(range(max(hosts) + 1)):
        raise ValueError(f"timeline.hosts is {hosts}, but must list each rank's host, numbered from 0")
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
