"""Compare push and pull between hosts with slow links with all-reduces and with predictions.

    python -m benchmarks.parameter_server [--workers 4] [--megabytes 25] [--rate 1gbit] [--hosts 2]

Every rank is on its own host, unless `--hosts` sets the number of hosts. Hosts are network namespaces, so
this requires root. `planner.comm` predicts the times from a preflight of the same number of ranks on those
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
    options = (dist.get_rank(), gloo_group(_TIMEOUT_S), int(BUCKET_MB * 2**20))
    exchange = Exchange(parameters, serve, work, *options)

    def push() -> None:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        exchange.push()

    times = [(timed(push), timed(exchange.pull)) for _ in range(repeat + 1)][1:]
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
    start = time.perf_counter()
    run()
    slowest = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def machine_of(members: Sequence[Host]) -> Machine:
    """Measure the capacities of the hosts with one active rank for each entry of `members`."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        run_ranks(
            preflight.main, len(members), ["--json", file.name], init=False, hosts=members, timeout_s=200
        )
        return Machine(**measured(entries.read(Path(file.name))))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", default="1,2,4,all")
    parser.add_argument("--hosts", type=int, default=None, help="number of hosts (one per rank)")
    parser.add_argument("--megabytes", type=float, default=25.0)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    num_bytes, workers, choices = int(args.megabytes * 2**20), args.workers, args.servers.split(",")
    most = workers + max((int(word) for word in choices if word != "all"), default=0)
    where = f"{args.hosts} hosts" if args.hosts else "one host per rank"
    with network(args.hosts or most, args.rate) as made:
        print(f"{workers} workers, {args.megabytes:g} MiB fp32, {where}, links {args.rate}")
        print(f"{'':16}{'push ms':>9}{'pull ms':>9}{'sum ms':>9}{'predicted':>11}{'ratio':>7}")

        def spread(world: int) -> tuple[list[int], list[Host]]:
            hosts = [rank * len(made) // world for rank in range(world)] if args.hosts else list(range(world))
            return hosts, [made[host] for host in hosts]

        hosts, members = spread(workers)
        machine = machine_of(members)
        names = ["master_worker", "ring", "hierarchical"]
        work_options = (names, hosts, num_bytes, args.repeat)
        found = run_ranks(time_all_reduces, workers, *work_options, hosts=members, timeout_s=300)[0]
        for name, seconds in found.items():
            schedules = [build(name, rank, hosts) for rank in range(workers)]
            print_row(
                name,
                [float("nan"), float("nan"), seconds],
                predict(schedules, hosts, machine, num_bytes).seconds,
            )
        for servers in choices:
            world = workers if servers == "all" else workers + int(servers)
            serve, work = roles(servers, world)
            hosts, members = spread(world)
            machine = machine_of(members)
            options = (servers, num_bytes, args.repeat)
            seconds = run_ranks(time_exchange, world, *options, hosts=members, timeout_s=300)[0]
            segment_bytes = int(BUCKET_MB * 2**20)
            predicted_s = sum(
                predict(schedules, hosts, machine, num_bytes, segment_bytes=segment_bytes).seconds
                for schedules in exchange(serve, work)
            )
            print_row(f"servers: {servers}", [*seconds, sum(seconds)], predicted_s)


def print_row(name: str, seconds: Sequence[float], predicted_s: float) -> None:
    columns = "".join(f"{1e3 * value:>9.1f}" for value in seconds)
    print(f"{name:16}{columns}{1e3 * predicted_s:>11.1f}{seconds[-1] / predicted_s:>7.2f}", flush=True)


if __name__ == "__main__":
    main()
