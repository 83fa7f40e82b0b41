"""Predict the step of a training run in another world, from what the run measured where it was.

A step is what it computes, and what of its communication does not hide behind that. A run under strategy=ddp
leaves in result.json how long a step takes, and of its backward passes when each bucket is ready, and how
long before the last gradient that is. One bucket moves at a time, in the order in which they are ready; what
is under way after the last gradient is exposed. Under strategy=fsdp with a schedule, buckets are the gathers
and reduces of units, each with the moment at which the computation comes to need it, and there stands still
until it is there. The computing is taken as it was: each process has the same batch, and as much of a
processor.
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
    numel: int  # of fp32
    early_s: float  # ready so much computing before the end, which of DDP is the last gradient
    needed_s: float = 0.0  # as early is it needed
    collective: Collective = Collective.ALL_REDUCE


@dataclass(frozen=True)
class PredictedStep:
    """Seconds of one step; the total is what it computes, what is exposed, and what computing was slowed."""

    computed_s: float
    hidden_s: float
    exposed_s: float
    slowed_s: float  # where the processors that move what is hidden would compute meanwhile

    @property
    def seconds(self) -> float:
        return self.computed_s + self.exposed_s + self.slowed_s


@dataclass(frozen=True)
class MeasuredRun:
    """What a run directory tells of its steps."""

    step_s: float
    exposed_s: float
    buckets: Sequence[BucketTiming]
    algorithm: str
    hosts: Sequence[int]  # of every rank
    itemsize: int  # bytes on the wire
    on_cpu: bool

    def computed_s(self, machine: Machine | None) -> float:
        """What a step takes but for communication.

        Of what was exposed only so much is communication as the links of the run explain, if they are known:
        the rest is waiting for ranks that were late, as they will be anywhere.

        Args:
            machine: where the run was; None if that is not known.

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
                f"a step took {self.step_s * 1e3:g} ms, and its communication alone explains "
                f"{(exposed_s + slowed_s) * 1e3:g} ms: nothing is left for computing, and nothing to plan "
                "with; train for longer, and let --from be of the hosts where it ran"
            )
        return computed_s

    def step(self, world: PlannedWorld, algorithm: str, computed_s: float) -> PredictedStep:
        """A step there, with the buckets of this run."""
        moved = [world.collective(bucket.collective, algorithm, bucket.numel) for bucket in self.buckets]
        total_s, processors_s = sum(one.seconds for one in moved), sum(one.processors_s for one in moved)
        moments = [(-bucket.early_s, False, index) for index, bucket in enumerate(self.buckets)]
        moments += [(-bucket.needed_s, True, index) for index, bucket in enumerate(self.buckets)]
        free_s, stood_s, there_s = float("-inf"), 0.0, [0.0] * len(moved)  # on a clock that runs on meanwhile
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
    """Raises ValueError where `run_dir` is no run that can be planned with, and says which is; OSError."""
    result = entries.read(run_dir / "result.json")
    timeline = result.get("timeline")
    if timeline is None or timeline.value == {}:
        raise ValueError(
            "its result.json has no timeline: train with two processes or more and strategy=ddp, "
            "comm.timeline=true and any comm but powersgd; or with strategy=fsdp, comm=ring or another "
            "schedule, shard_group=world and one micro-batch a step"
        )
    algorithm = _LIKE.get(result["comm"].text(), result["comm"].text())
    if algorithm not in ALGORITHMS:
        raise ValueError(f"comm={algorithm} is none of {', '.join(ALGORITHMS)}")
    hosts = [host.whole() for host in timeline["hosts"].each()]
    if set(hosts) != set(range(max(hosts) + 1)):
        raise ValueError(f"timeline.hosts is {hosts}: the host of every rank, from 0 without gaps, is needed")
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
    # Runs of before had neither of the two, as they had no units.
    needed, how = entry.get("needed_ms"), entry.get("collective")
    return BucketTiming(
        max(1, entry["bytes"].whole() // FP32),
        entry["early_ms"].number(least=-entries.MOST) / 1e3,
        needed.number(least=-entries.MOST) / 1e3 if needed else 0.0,
        Collective(how.text(*(known.value for known in Collective))) if how else Collective.ALL_REDUCE,
    )
