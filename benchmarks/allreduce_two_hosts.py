"""Compare all-reduce algorithms with gloo's, for one bucket between hosts with slow links.

    python -m benchmarks.allreduce_two_hosts [--hosts 2] [--per-host 2] [--megabytes 25] [--rate 1gbit]

Hosts are network namespaces, so this requires root unless `--hosts 1` is given. Prints the median time of
each algorithm, its speed relative to gloo's all-reduce, and the CPU time of all ranks. Each run is compared
with the runs of gloo before and after it, so that other load cancels out.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist

from tests.hosts import hosts as network
from tests.ranks import run_ranks
from trainer.comm.algorithms.all_reduce import build
from trainer.comm.executor import Executor

WIRE_DTYPES = {"": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def measure(
    hosts: list[int], names: list[str], numel: int, repeat: int, segment_mb: float, width: int, shared: bool
) -> dict[str, tuple[float, ...]]:
    """Return seconds, speed relative to gloo, CPU seconds by name; ring+bf16 sends bf16."""
    rank = dist.get_rank()
    bucket = torch.randn(numel)
    runs: dict[str, Callable[[], object]] = {}
    for name in names:
        algorithm, _, wire = name.partition("+")
        group, schedule = dist.new_group(backend="gloo"), build(algorithm, rank, hosts)
        executor = Executor(
            *(group, schedule, torch.device("cpu"), WIRE_DTYPES[wire], segment_mb, width),
            hosts=hosts if shared else None,
        )
        runs[name] = partial(executor.run, bucket, len(hosts))
    gloo = partial(dist.all_reduce, bucket)
    times: dict[str, list[float]] = {name: [] for name in [*names, "gloo"]}
    ratios: dict[str, list[float]] = {name: [] for name in names}
    busy: dict[str, list[float]] = {name: [] for name in [*names, "gloo"]}
    for _ in range(repeat + 1):
        for name in names:
            bucket.fill_(rank)
            before, own, after = timed(gloo), timed(runs[name]), timed(gloo)
            times[name].append(own[0])
            busy[name].append(own[1])
            ratios[name].append((before[0] + after[0]) / 2 / own[0])
            times["gloo"] += [before[0], after[0]]
            busy["gloo"] += [before[1], after[1]]
    ratios["gloo"] = [1.0, 1.0]
    # The first round opens connections and first touches memory.
    columns = (times, ratios, busy)
    return {name: tuple(statistics.median(column[name][1:]) for column in columns) for name in times}


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of the slowest rank, and the CPU seconds of all ranks together."""
    dist.barrier()
    began, busy = time.perf_counter(), time.process_time()
    run()
    slowest = torch.tensor([time.perf_counter() - began])
    total = torch.tensor([time.process_time() - busy])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return float(slowest), float(total)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("algorithms", nargs="*", default=["hierarchical", "ring", "halving_doubling", "tree"])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=25.0)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--segment-kb", type=int, default=2048)
    parser.add_argument("--width", type=int, default=2)
    parser.add_argument("--no-shared", action="store_true", help="use gloo also within a host")
    args = parser.parse_args()
    indices = [rank // args.per_host for rank in range(args.hosts * args.per_host)]
    work = (indices, args.algorithms, int(args.megabytes * 2**20 / 4), args.repeat)
    with network(args.hosts, args.rate) if args.hosts > 1 else nullcontext([0]) as members:
        rank_hosts = [members[i] for i in indices]
        results = run_ranks(
            measure,
            len(indices),
            *work,
            args.segment_kb / 1024,
            args.width,
            not args.no_shared,
            hosts=rank_hosts,
            timeout_s=600,
        )
    print(f"{args.hosts} x {args.per_host} ranks, {args.megabytes:g} MiB fp32, links {args.rate}")
    for name, (seconds, speedup, busy) in results[0].items():
        print(f"{name:24} {1e3 * seconds:8.1f} ms   {speedup:5.2f} x gloo   {1e3 * busy:8.1f} ms CPU time")


if __name__ == "__main__":
    main()
