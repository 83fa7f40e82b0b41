"""Measure push and pull between hosts on slow links, compared with all-reduces and predictions.

    python -m benchmarks.parameter_server [--workers 4] [--megabytes 25] [--rate 1gbit] [--hosts 2]

Every rank is on its own host, or ranks are distributed over `--hosts`. Hosts are network namespaces, so this
needs root. Predictions are made by `planner.comm` from a preflight of the same number of ranks on those
hosts. Times are medians; the ratio is measured / predicted.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from planner import entries
from planner.cost_model import Machine, measured, predict
from planner.push_pull import exchange
from planner.world import BUCKET_MB
from tests.hosts import Host
from tests.hosts import hosts as network
from tests.ranks import run_ranks
from trainer.comm import preflight
from trainer.comm.algorithms.all_reduce import build
from trainer.comm.executor import Executor
from trainer.comm.parameter_server import Exchange
from trainer.distributed.collectives import gloo_group
from trainer.strategies.parameter_server import roles

_TIMEOUT_S = 60.0


def time_exchange(servers: str, num_bytes: int, repeat: int) -> tuple[float, float]:
    """Return the median seconds of (push, pull) on the slowest rank."""
    serve, work = roles(servers, dist.get_world_size())
    parameters = [torch.nn.Parameter(torch.zeros(num_bytes // 4096 // 24, 1024)) for _ in range(24)]
    asked = (dist.get_rank(), gloo_group(_TIMEOUT_S), int(BUCKET_MB * 2**20))
    ours = Exchange(parameters, serve, work, *asked)

    def push() -> None:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        ours.push()

    times = [(timed(push), timed(ours.pull)) for _ in range(repeat + 1)][1:]
    return statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)


def time_all_reduces(
    names: Sequence[str], hosts: Sequence[int], num_bytes: int, repeat: int
) -> dict[str, float]:
    rank = dist.get_rank()
    bucket, found = torch.zeros(num_bytes // 4), {}
    for name in names:
        group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        executor = Executor(group, build(name, rank, hosts), torch.device("cpu"), hosts=hosts)
        times = [timed(lambda run=executor: run.run(bucket)) for _ in range(repeat + 1)]
        found[name] = statistics.median(times[1:])
    return found


def timed(run: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    run()
    slowest = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def machine_of(places: Sequence[Host]) -> Machine:
    """Measure the capacities with the same number of active ranks on the same hosts."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        run_ranks(preflight.main, len(places), ["--json", file.name], init=False, hosts=places, timeout_s=200)
        return Machine(**measured(entries.read(Path(file.name))))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", default="1,2,4,all")
    parser.add_argument("--hosts", type=int, default=None, help="one for each rank")
    parser.add_argument("--megabytes", type=float, default=25.0)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    num_bytes, workers, choices = int(args.megabytes * 2**20), args.workers, args.servers.split(",")
    most = workers + max((int(word) for word in choices if word != "all"), default=0)
    where = f"on {args.hosts} hosts" if args.hosts else "each rank a host"
    with network(args.hosts or most, args.rate) as made:
        print(f"{workers} workers, {args.megabytes:g} MiB fp32, {where}, links {args.rate}")
        print(f"{'':16}{'push ms':>9}{'pull ms':>9}{'both ms':>9}{'predicted':>11}{'ratio':>7}")

        def spread(world: int) -> tuple[list[int], list[Host]]:
            hosts = [rank * len(made) // world for rank in range(world)] if args.hosts else list(range(world))
            return hosts, [made[host] for host in hosts]

        hosts, places = spread(workers)
        machine = machine_of(places)
        names = ["master_worker", "ring", "hierarchical"]
        asked = (names, hosts, num_bytes, args.repeat)
        found = run_ranks(time_all_reduces, workers, *asked, hosts=places, timeout_s=300)[0]
        for name, seconds in found.items():
            schedules = [build(name, rank, hosts) for rank in range(workers)]
            line(
                name,
                [float("nan"), float("nan"), seconds],
                predict(schedules, hosts, machine, num_bytes).seconds,
            )
        for servers in choices:
            world = workers if servers == "all" else workers + int(servers)
            serve, work = roles(servers, world)
            hosts, places = spread(world)
            machine = machine_of(places)
            asked = (servers, num_bytes, args.repeat)
            ways = run_ranks(time_exchange, world, *asked, hosts=places, timeout_s=300)[0]
            segment_bytes = int(BUCKET_MB * 2**20)
            wanted = sum(
                predict(way, hosts, machine, num_bytes, segment_bytes=segment_bytes).seconds
                for way in exchange(serve, work)
            )
            line(f"servers: {servers}", [*ways, sum(ways)], wanted)


def line(name: str, seconds: Sequence[float], wanted: float) -> None:
    columns = "".join(f"{1e3 * value:>9.1f}" for value in seconds)
    print(f"{name:16}{columns}{1e3 * wanted:>11.1f}{seconds[-1] / wanted:>7.2f}", flush=True)


if __name__ == "__main__":
    main()
