"""Predict the step of a training run in another world, from what the run measured where it was.

A step is what it computes, and what of its communication does not hide behind that. A run under strategy=ddp
leaves in result.json how long a step takes, and of its backward passes when each bucket is ready, and how
long before the last gradient that is. One bucket moves at a time, in the order in which they are ready; what
is under way after the last gradient is exposed. Under strategy=fsdp with a schedule, buckets are the gathers
and reduces of units, each with the moment at which the computation comes to need it, and there stands still
until it is there. The computing is taken as it was: each process has the same batch, and as much of a
processor.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.comm.network.predict import Machine
from trainer.comm.network.world import FP32, World
from trainer.comm.schedules.algorithms import ALGORITHMS
from trainer.comm.schedules.schedule import Collective

_ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
_LIKE = {"native": "ring"}  # gloo's and NCCL's own all-reduces of long buckets are rings


@dataclass(frozen=True)
class Bucket:
    numel: int  # of fp32
    early_s: float  # ready so much computing before the end, which of DDP is the last gradient
    needed_s: float = 0.0  # as early is it needed
    collective: Collective = Collective.ALL_REDUCE


@dataclass(frozen=True)
class Step:
    """Seconds of one step; the total is what it computes, what is exposed, and what computing was slowed."""

    computed_s: float
    hidden_s: float
    exposed_s: float
    slowed_s: float  # where the processors that move what is hidden would compute meanwhile

    @property
    def seconds(self) -> float:
        return self.computed_s + self.exposed_s + self.slowed_s


@dataclass(frozen=True)
class TrainedRun:
    """What a run directory tells of its steps."""

    step_s: float
    exposed_s: float
    buckets: Sequence[Bucket]
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
        """
        exposed_s, slowed_s = self.exposed_s, 0.0
        if machine is not None:
            num_hosts = max(self.hosts) + 1
            world = World(num_hosts, len(self.hosts) // num_hosts, machine, self.itemsize)
            like = self.step(world, self.algorithm, 0.0)
            exposed_s, slowed_s = min(exposed_s, like.exposed_s), like.slowed_s
        return max(0.0, self.step_s - exposed_s - slowed_s)

    def step(self, world: World, algorithm: str, computed_s: float) -> Step:
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
        return Step(computed_s, hidden_s, exposed_s, slowed_s)

    def steps(self, world: World, computed_s: float, algorithms: Sequence[str]) -> dict[str, Step]:
        """By algorithm, fastest first."""
        found = {name: self.step(world, name, computed_s) for name in algorithms}
        return dict(sorted(found.items(), key=lambda item: item[1].seconds))


def read(run_dir: Path) -> TrainedRun:
    """Raises ValueError where `run_dir` is no run that can be planned with, and says which is; OSError."""
    try:
        result = json.loads((run_dir / "result.json").read_text())
        timeline: Mapping[str, Any] = result.get("timeline") or {}
        if not timeline:
            raise ValueError(
                "its result.json has no timeline: train with two processes or more and strategy=ddp, "
                "comm.timeline=true and any comm but powersgd; or with strategy=fsdp, comm=ring or another "
                "schedule, shard_group=world and one micro-batch a step"
            )
        algorithm = _LIKE.get(result["comm"], result["comm"])
        if algorithm not in ALGORITHMS:
            raise ValueError(f"comm={algorithm} is none of {', '.join(ALGORITHMS)}")
        if not 0 < result["ms_per_step"] < float("inf"):
            raise ValueError(f"its ms_per_step is {result['ms_per_step']}, but must be more than 0")
        if not timeline["hosts"] or not all(isinstance(host, int) for host in timeline["hosts"]):
            raise ValueError(f"its hosts are {timeline['hosts']}, but must be a number for each rank")
        return TrainedRun(
            step_s=result["ms_per_step"] / 1e3,
            exposed_s=timeline["exposed_ms"] / 1e3,
            buckets=[
                Bucket(
                    max(1, bucket["bytes"] // FP32),
                    bucket["early_ms"] / 1e3,
                    bucket.get("needed_ms", 0.0) / 1e3,  # runs of before had none, as they had no units
                    Collective(bucket.get("collective", Collective.ALL_REDUCE)),
                )
                for bucket in timeline["buckets"]
            ],
            algorithm=algorithm,
            hosts=timeline["hosts"],
            itemsize=_ITEMSIZE[timeline["wire_dtype"]],
            on_cpu=timeline["device"] == "cpu",
        )
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"its result.json is not as a run leaves it: {error!r}") from error
