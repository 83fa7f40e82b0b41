"""Any number of hosts and processes, and what all-reduces and parameter servers would cost there."""

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
        itemsize: bytes in which an fp32 element is sent.
        segment_bytes: see comm.segment_mb.
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
        """The host of every rank; one object, so that caches need not compare thousands of numbers."""
        return Hosts(rank // self.per_host for rank in range(self.size))

    def with_hosts(self, num_hosts: int) -> "PlannedWorld":
        return replace(self, num_hosts=num_hosts)

    def all_reduce(self, algorithm: str, numel: int) -> Prediction:
        """The cost for a bucket of `numel` elements."""
        if algorithm not in self._predictors:
            hosts = self.hosts

            def one(rank: int) -> Schedule:
                return build(algorithm, rank, hosts)

            self._predictors[algorithm] = Predictor(Family(one, self.size), hosts, self.machine)
        return self._predictors[algorithm](numel * self.itemsize, self.itemsize, self.segment_bytes)

    def all_reduces(self, num_bytes: float) -> dict[str, Prediction]:
        """The cost of every algorithm for `num_bytes` of fp32, fastest first."""
        numel = max(1, round(num_bytes / FP32))
        found = {name: self.all_reduce(name, numel) for name in ALGORITHMS}
        return dict(sorted(found.items(), key=lambda item: item[1].seconds))

    def exchange(self, num_servers: int, num_bytes: float) -> tuple[Prediction, Prediction]:
        """The cost of push and pull for `num_bytes` of fp32. If all ranks serve, all work, too."""
        workers = range(0 if num_servers == self.size else num_servers, self.size)
        ways, segment_bytes = exchange(range(num_servers), workers), int(BUCKET_MB * 2**20)
        push, pull = (
            predict(way, self.hosts, self.machine, round(num_bytes), segment_bytes=segment_bytes)
            for way in ways
        )
        return push, pull
