"""Predict the step of a training run in another world, from what the run measured where it was.

A step is what it computes, and what of its communication does not hide behind that. A run under strategy=ddp
leaves in result.json how long a step takes, and of its backward passes when each bucket is ready, and how
long before the last gradient that is. One bucket moves at a time, in the order in which they are ready; what
is under way after the last gradient is exposed. The computing is taken as it was: each process has the same
batch, and as much of a processor.
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
    early_s: float  # before the last gradient of the backward pass


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
        total_s = processors_s = 0.0
        free_s = float("-inf")  # when the bucket before has arrived; 0 is the last gradient
        for bucket in self.buckets:
            moved = world.collective(Collective.ALL_REDUCE, algorithm, bucket.numel)
            free_s = max(free_s, -bucket.early_s) + moved.seconds
            total_s, processors_s = total_s + moved.seconds, processors_s + moved.processors_s
        exposed_s = min(total_s, max(0.0, free_s))
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
                "its result.json has no timeline: train with strategy=ddp, comm.timeline=true and two "
                "processes or more, any comm but powersgd"
            )
        algorithm = _LIKE.get(result["comm"], result["comm"])
        if algorithm not in ALGORITHMS:
            raise ValueError(f"comm={algorithm} is none of {', '.join(ALGORITHMS)}")
        return TrainedRun(
            step_s=result["ms_per_step"] / 1e3,
            exposed_s=timeline["exposed_ms"] / 1e3,
            buckets=[
                Bucket(max(1, bucket["bytes"] // FP32), bucket["early_ms"] / 1e3)
                for bucket in timeline["buckets"]
            ],
            algorithm=algorithm,
            hosts=timeline["hosts"],
            itemsize=_ITEMSIZE[timeline["wire_dtype"]],
            on_cpu=timeline["device"] == "cpu",
        )
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"its result.json is not as a run leaves it: {error!r}") from error
