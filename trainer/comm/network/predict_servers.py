"""Predicts a step of asynchronous parameter servers on other hosts and links, from what a run measured.

A step has as many shares as there are workers. For each share a worker pulls, computes and pushes, and the
servers update. Workers queue for the servers' links, in each direction, and for the servers themselves. Mean
value analysis gives the lengths of these queues: a worker that comes finds those of a system with one worker
fewer. Source: Reiser and Lavenberg, "Mean-value analysis of closed multichain queuing networks", JACM 1980.
Workers are taken as equal. The time in which they waited for slower ones, with a finite
strategy.max_staleness, stays.
"""

from dataclasses import dataclass
from pathlib import Path

from trainer.comm.network import entries
from trainer.comm.network.cost_model import Machine
from trainer.comm.network.predict_step import PredictedStep, slowdown_s
from trainer.comm.network.world import PlannedWorld


@dataclass(frozen=True)
class MeasuredServers:
    """What a run directory records of its steps, and of a typical share of one."""

    step_s: float
    servers: str  # as in strategy.servers
    world_size: int
    num_bytes: int  # of a pull, and of a push
    num_buckets: int
    forward_s: float  # computing, until the last values are needed
    backward_s: float  # computing, from the first gradients that can be sent to the last
    blocked_s: float  # a worker, for its pull and push and the servers
    busy_s: float  # a server: it copies values, and updates
    on_cpu: bool

    @property
    def title(self) -> str:
        return f"asynchronous, strategy.servers={self.servers}"

    def num_workers(self, world: PlannedWorld) -> int:
        """0 or less if there are too few ranks."""
        return world.size if self.servers == "all" else world.size - int(self.servers)

    def computed_s(self, machine: Machine | None) -> float:
        """The time of a step without pulls and pushes, on any links. Raises ValueError if none is left."""
        if self.blocked_s < self.step_s:
            return self.step_s - self.blocked_s
        raise ValueError(
            f"a step took {self.step_s * 1e3:g} ms, but workers waited {self.blocked_s * 1e3:g} ms for "
            "servers: no time is left for computing; train for longer, with workers of equal speed"
        )

    def steps(self, world: PlannedWorld, computed_s: float) -> dict[str, PredictedStep]:
        return {"parameter_server": self.step(world, computed_s)}

    def step(self, world: PlannedWorld, computed_s: float) -> PredictedStep:
        """Predict a step on these hosts, with servers as in this run."""
        num_workers = self.num_workers(world)
        num_servers = world.size if self.servers == "all" else int(self.servers)
        # If all serve, each has its part of the rows, and of their updates.
        busy_s = self.busy_s * (self.world_size / world.size if self.servers == "all" else 1.0)
        ways_alone = world.exchange(num_servers, self.num_bytes, 1)
        alone, processors_s = [way.seconds for way in ways_alone], sum(way.processors_s for way in ways_alone)
        # Workers that queue make a server send and receive at once; if all serve, `exchange` has that.
        apart = self.servers != "all" and world.num_hosts > 1
        divisor = num_workers * (world.machine.crowded if apart else 1.0)
        each = [way.seconds / divisor for way in world.exchange(num_servers, self.num_bytes)]
        # A push, a pull, and the server's own work: alone, and of the resource that others wait for.
        undisturbed, demands = [*alone, busy_s], [*each, busy_s]
        queues = [0.0, 0.0, 0.0]
        for number in range(1, num_workers + 1):
            if self.servers == "all":  # others push through the link through which a worker pulls
                queues[:2] = [queues[0] + queues[1]] * 2
            waits = [demand * queue for demand, queue in zip(demands, queues, strict=True)]
            push_s, pull_s, server_s = (own + wait for own, wait in zip(undisturbed, waits, strict=True))
            # The first values are needed at once, and the last gradients come at the end.
            exposed_s = server_s + max(push_s - self.backward_s, push_s / self.num_buckets)
            exposed_s += max(pull_s - self.forward_s, pull_s / self.num_buckets)
            moved_s = push_s + pull_s + server_s
            hidden_s = max(0.0, moved_s - exposed_s)
            slowed_s = slowdown_s(world, hidden_s, moved_s, processors_s) if self.on_cpu else 0.0
            throughput = number / (computed_s + exposed_s + slowed_s)
            queues = [throughput * (demand + wait) for demand, wait in zip(demands, waits, strict=True)]
        return PredictedStep(computed_s, hidden_s, exposed_s, slowed_s)


def read(run_dir: Path) -> MeasuredServers | None:
    """None for a run without asynchronous servers. Raises OSError; ValueError if a plan cannot use it."""
    result = entries.read(run_dir / "result.json")
    if not result.has("share"):
        return None
    if not result.has("ms_per_step"):
        raise ValueError(
            "it was too short to have a time per step: raise train.max_steps, or lower train.log_every_steps"
        )
    share = result.mapping("share")
    times = {
        name: entries.number(share, f"{name}_ms") / 1e3 for name in ("forward", "backward", "blocked", "busy")
    }
    return MeasuredServers(
        entries.number(result, "ms_per_step", positive=True) / 1e3,
        share.text("servers"),
        max(1, result.count("world_size")),
        max(1, share.count("bytes")),
        max(1, share.count("buckets")),
        **{f"{name}_s": seconds for name, seconds in times.items()},
        on_cpu=share.text("device") == "cpu",
    )
