"""The costs of all-reduces and parameter servers for any number of hosts and processes."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from planner.cost_model import Machine, Prediction, Predictor, predict
from planner.push_pull import exchange
from planner.rounds import Family
from trainer.comm.algorithms.all_reduce import ALGORITHMS, build
from trainer.comm.algorithms.pipeline import SEGMENT_MB
from trainer.comm.algorithms.rank_order import Hosts
from trainer.comm.algorithms.schedule import Schedule

BUCKET_MB = 4.0  # strategy.bucket_mb
FP32 = 4  # bytes


@dataclass(frozen=True)
class PlannedWorld:
    """Equal hosts, each with the same number of processes.

    Args:
        itemsize: bytes of an element on the wire.
        segment_bytes: see the setting comm.segment_mb.
    """

    num_hosts: int
    per_host: int
    machine: Machine
    itemsize: int = FP32
    segment_bytes: int = int(SEGMENT_MB * 2**20)
    _predictors: dict[str, Predictor] = field(default_factory=dict, init=False)

    @property
    def size(self) -> int:
        return self.num_hosts * self.per_host

    @cached_property
    def hosts(self) -> Hosts:
        """The host of every rank, as one object, for fast comparisons in caches."""
        return Hosts(rank // self.per_host for rank in range(self.size))

    def with_hosts(self, num_hosts: int) -> "PlannedWorld":
        return replace(self, num_hosts=num_hosts)

    def all_reduce(self, algorithm: str, numel: int) -> Prediction:
        """Predict an all-reduce of `numel` elements."""
        if algorithm not in self._predictors:
            hosts = self.hosts

            def build_for(rank: int) -> Schedule:
                return build(algorithm, rank, hosts)

            self._predictors[algorithm] = Predictor(Family(build_for, self.size), hosts, self.machine)
        return self._predictors[algorithm](numel * self.itemsize, self.itemsize, self.segment_bytes)

    def all_reduces(self, num_bytes: float) -> dict[str, Prediction]:
        """Predict an all-reduce of `num_bytes` of fp32 for every algorithm, fastest first."""
        numel = max(1, round(num_bytes / FP32))
        by_name = {name: self.all_reduce(name, numel) for name in ALGORITHMS}
        return dict(sorted(by_name.items(), key=lambda item: item[1].seconds))

    def exchange(self, num_servers: int, num_bytes: float) -> tuple[Prediction, Prediction]:
        """Predict push and pull of `num_bytes` of fp32. If all ranks are servers, all are also workers."""
        workers = range(0 if num_servers == self.size else num_servers, self.size)
        schedules, segment_bytes = exchange(range(num_servers), workers), int(BUCKET_MB * 2**20)
        push, pull = (
            predict(each, self.hosts, self.machine, round(num_bytes), segment_bytes=segment_bytes)
            for each in schedules
        )
        return push, pull
