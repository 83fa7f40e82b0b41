"""Predicts a training step on other hosts and links, from what a run measured.

A step is its computing time plus the communication that is not hidden behind it. A run with strategy=ddp
stores in result.json how long a step takes, and how long before the last gradient of a backward pass each
bucket is ready. One bucket moves at a time, in the order in which they are ready; what moves after the last
gradient is exposed. With strategy=fsdp and a schedule, buckets are the gathers and reduces of units, each
with the moment at which the computation needs it and is blocked until it arrives. The computing time is
unchanged: each process has the same batch, and the same share of a processor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.comm.algorithms.all_reduce import ALGORITHMS
from trainer.comm.algorithms.schedule import Collective
from trainer.comm.network import entries
from trainer.comm.network.cost_model import Machine
from trainer.comm.network.world import FP32, PlannedWorld

_ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
_LIKE = {"native": "ring"}  # gloo's and NCCL's own all-reduces of long buckets are rings


@dataclass(frozen=True)
class BucketTiming:
    numel: int  # fp32 elements
    early_s: float  # ready this much computing time before the end (DDP: the last gradient)
    needed_s: float = 0.0  # needed this much before the end
    collective: Collective = Collective.ALL_REDUCE


@dataclass(frozen=True)
class PredictedStep:
    """Seconds of one step: computing, exposed communication, and the slowdown of computing, added up."""

    computed_s: float
    hidden_s: float
    exposed_s: float
    slowed_s: float  # by the processors that move hidden communication

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
        moved = [world.collective(bucket.collective, algorithm, bucket.numel) for bucket in self.buckets]
        total_s, processors_s = sum(one.seconds for one in moved), sum(one.processors_s for one in moved)
        moments = [(-bucket.early_s, False, index) for index, bucket in enumerate(self.buckets)]
        moments += [(-bucket.needed_s, True, index) for index, bucket in enumerate(self.buckets)]
        free_s, stood_s, there_s = float("-inf"), 0.0, [0.0] * len(moved)  # with blocked time
        for computed, is_needed, index in sorted(moments):
            if is_needed:
                stood_s += max(0.0, there_s[index] - computed - stood_s)
            else:
                free_s = there_s[index] = max(free_s, computed + stood_s) + moved[index].seconds
        exposed_s = min(total_s, stood_s)
        hidden_s = total_s - exposed_s
        slowed_s = 0.0
        if self.on_cpu and total_s > 0:
            computing = min(1.0, world.per_host / world.machine.parallelism)  # of a host's processors
            slowed_s = hidden_s * min(1.0, processors_s / total_s) * computing
        return PredictedStep(computed_s, hidden_s, exposed_s, slowed_s)

    def steps(
        self, world: PlannedWorld, computed_s: float, algorithms: Sequence[str]
    ) -> dict[str, PredictedStep]:
        """By algorithm, fastest first."""
        found = {name: self.step(world, name, computed_s) for name in algorithms}
        return dict(sorted(found.items(), key=lambda item: item[1].seconds))


def read(run_dir: Path) -> MeasuredRun:
    """Raises OSError; ValueError if a plan cannot use the run in `run_dir`, with the requirements."""
    result = entries.read(run_dir / "result.json")
    timeline = result.get("timeline")
    if timeline is None or timeline.value == {}:
        raise ValueError(
            "its result.json has no timeline: train with two or more processes and strategy=ddp, "
            "comm.timeline=true and any comm except powersgd; or with strategy=fsdp, comm=ring or another "
            "schedule, shard_group=world and one micro-batch a step"
        )
    algorithm = _LIKE.get(result["comm"].text(), result["comm"].text())
    if algorithm not in ALGORITHMS:
        raise ValueError(f"comm={algorithm} is not one of {', '.join(ALGORITHMS)}")
    hosts = [host.whole() for host in timeline["hosts"].each()]
    if set(hosts) != set(range(max(hosts) + 1)):
        raise ValueError(f"timeline.hosts is {hosts}, but must be each rank's host, from 0 without gaps")
    return MeasuredRun(
        step_s=result["ms_per_step"].number(positive=True) / 1e3,
        exposed_s=timeline["exposed_ms"].number() / 1e3,
        buckets=[_bucket(bucket) for bucket in timeline["buckets"].each()],
        algorithm=algorithm,
        hosts=hosts,
        itemsize=_ITEMSIZE[timeline["wire_dtype"].text(*_ITEMSIZE)],
        on_cpu=timeline["device"].text() == "cpu",
    )


def _bucket(entry: entries.Entry) -> BucketTiming:
    return BucketTiming(
        max(1, entry["bytes"].whole() // FP32),
        entry["early_ms"].number(least=-entries.MOST) / 1e3,
        entry["needed_ms"].number(least=-entries.MOST) / 1e3,
        Collective(entry["collective"].text(*(known.value for known in Collective))),
    )
