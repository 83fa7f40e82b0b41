"""Compare all all-reduce algorithms: `torchrun ... -m benchmarks.allreduce`.

Prints the columns of nccl-tests: time, algorithm bandwidth (bytes / time), bus bandwidth (algorithm bandwidth
times 2(P-1)/P, what the links of an ideal ring would carry; see nccl-tests' doc/PERFORMANCE.md) and the
number of wrong elements. Every round runs all algorithms one after the other, so that other load on the
machine affects all of them equally. A time is that of the slowest rank, median over rounds; `--json` also
contains the fastest round.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.comm.algorithms.all_reduce import ALGORITHMS, build
from trainer.comm.executor import Executor
from trainer.comm.preflight_checks import GroupRank
from trainer.config import DistributedConfig
from trainer.distributed.process_group import process_group
from trainer.distributed.ranks import Ranks
from trainer.launch.exits import exits

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
_NATIVE = "native"

AllReduce = Callable[[Tensor], object]
"""Replaces a bucket with its sum over all ranks."""


@dataclass(frozen=True)
class Row:
    size: int  # bytes
    algorithm: str
    seconds: float  # median
    fastest_s: float
    algbw_gb_s: float
    busbw_gb_s: float
    wrong: int  # number of wrong elements, over all ranks

    def __str__(self) -> str:
        unit = next(unit for unit in "GMK" if self.size >= _UNITS[unit] or unit == "K")
        return (
            f"{self.size / _UNITS[unit]:>8g} {unit}  {self.algorithm:<18}{self.seconds * 1e3:>9.3f} ms"
            f"{self.algbw_gb_s:>12.3f}{self.busbw_gb_s:>12.3f}{self.wrong:>8}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    device = "cpu" if options.backend == "gloo" else "auto"
    fields = (device, None, options.timeout_s, False, "env://", None, None)
    settings = DistributedConfig(*fields, "auto" if options.share_gpu else 1)
    with exits(), process_group(settings) as joined:
        me = GroupRank(joined.rank, joined.world_size, joined.device)
        runs = _all_reduces(joined, me, options)
        print_on_rank_0 = print if me.rank == 0 else lambda *_, **__: None
        sent_as = options.wire_dtype if _wire(options) else options.dtype
        print_on_rank_0(
            f"allreduce: {joined.num_hosts} hosts, {me.world_size} processes, {joined.backend} on "
            f"{me.device.type}, {options.dtype} sent as {sent_as}, {options.rounds} rounds\n\n"
            f"{'size':>10}  {'algorithm':<18}{'time':>12}{'algbw GB/s':>12}{'busbw GB/s':>12}{'wrong':>8}",
            flush=True,
        )
        rows: list[Row] = []
        for size in options.sizes:
            measured = _measure(me, runs, size, options)
            rows += measured
            print_on_rank_0(*measured, sep="\n", flush=True)
        if joined.is_main and options.json is not None:
            results = {"hosts": joined.hosts, "rows": [asdict(row) for row in rows]}
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(row.wrong for row in rows))


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allreduce", description=__doc__)
    everything = ",".join([_NATIVE, *ALGORITHMS])
    add = parser.add_argument
    add("--sizes", type=_sizes, default="4K,256K,4M,25M", help="bytes of a bucket (4K,256K,4M,25M)")
    add("--algorithms", type=_algorithms, default=everything, help=f"from {everything} (all)")
    add("--dtype", choices=_DTYPES, default="fp32", help="dtype of the bucket (fp32)")
    add("--wire-dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="dtype that is sent (fp32)")
    add("--segment-mb", type=float, help="segment size in MiB (2 on CPUs, whole buckets on GPUs)")
    add("--rounds", type=int, default=10, help="timed rounds, after one that checks the sums (10)")
    add("--backend", choices=["gloo", "nccl"], help="default: nccl with a GPU, else gloo")
    add("--share-gpu", action="store_true", help="let ranks share a GPU; times are then meaningless")
    add("--timeout-s", type=float, default=60.0, help="timeout in seconds (60)")
    add("--json", type=Path, metavar="FILE", help="file for all results")
    options = parser.parse_args(argv)
    for name in ("segment_mb", "rounds", "timeout_s"):
        if getattr(options, name) is not None and not 0 < getattr(options, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: must be a positive number")
    return options


def _sizes(text: str) -> list[int]:
    sizes = []
    for item in text.split(","):
        number = item.rstrip("KMG")
        unit = item[len(number) :]
        if unit not in _UNITS or not number.replace(".", "", 1).isdecimal():
            raise argparse.ArgumentTypeError(f"{item!r} is not a size; write 4096, 4K, 25M or 1G")
        sizes.append(int(float(number) * _UNITS[unit]))
    return sizes


def _algorithms(text: str) -> list[str]:
    names, known = text.split(","), [_NATIVE, *ALGORITHMS]
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; choose from {', '.join(known)}")
    return names


def _wire(options: argparse.Namespace) -> torch.dtype | None:
    """Return the dtype in which sums are sent, or None if they are sent as they are."""
    narrow = options.wire_dtype != "fp32" and options.dtype in ("fp32", "fp64")
    return _DTYPES[options.wire_dtype] if narrow else None


def _all_reduces(joined: Ranks, me: GroupRank, options: argparse.Namespace) -> dict[str, AllReduce]:
    """Return the algorithms by name, ready to run (a collective)."""
    wire = _wire(options)
    timeout = timedelta(seconds=options.timeout_s)

    def new_group(backend: str) -> dist.ProcessGroup:
        group = dist.new_group(backend=backend, timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def native(bucket: Tensor) -> None:
        if wire is None:
            dist.all_reduce(bucket)
            return
        compressed = bucket.to(wire)  # like torch's compression hooks
        dist.all_reduce(compressed)
        bucket.copy_(compressed)

    def scheduled(algorithm: str) -> AllReduce:
        schedule = build(algorithm, me.rank, joined.hosts)
        group = new_group("nccl" if me.device.type == "cuda" else "gloo")
        executor = Executor(
            group,
            schedule,
            me.device,
            wire,
            options.segment_mb,
            hosts=joined.hosts,
            timeout_s=options.timeout_s,
        )
        return executor.run

    return {name: native if name == _NATIVE else scheduled(name) for name in options.algorithms}


def _measure(
    me: GroupRank, runs: dict[str, AllReduce], num_bytes: int, options: argparse.Namespace
) -> list[Row]:
    """Return a row for each algorithm, equal on all ranks."""
    dtype = _DTYPES[options.dtype]
    bucket = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=me.device)
    mine, total = addends(bucket.numel(), me.rank, me.world_size)
    wrong = torch.zeros(len(runs), device=me.device)
    seconds = torch.zeros(options.rounds + 1, len(runs), dtype=torch.float64, device=me.device)
    for round_, times in enumerate(seconds):
        for index, all_reduce in enumerate(runs.values()):
            bucket.copy_(mine)
            me.finish()
            dist.barrier()
            start = time.perf_counter()
            all_reduce(bucket)
            me.finish()
            times[index] = time.perf_counter() - start
            if round_ == 0:
                wrong[index] = _count_wrong(bucket, total, me.world_size, options)
    dist.all_reduce(wrong)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    timed = seconds[1:]  # the first round also connects and allocates
    times = zip(timed.median(0).values.tolist(), timed.amin(0).tolist(), strict=True)
    bus_factor = 2 * (me.world_size - 1) / me.world_size
    return [
        Row(num_bytes, name, median, fastest, rate := num_bytes / median / 1e9, rate * bus_factor, int(count))
        for name, (median, fastest), count in zip(runs, times, wrong.tolist(), strict=True)
    ]


def addends(numel: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Return the data of `rank` and the sum over all ranks, both (numel,) float64 with small integers.

    Every rank has the same random signs, shifted by its rank, so that the data differs between ranks, and
    every rank knows the sum without communication.
    """
    signs = torch.randint(-1, 2, (numel,), generator=torch.Generator().manual_seed(0)).double()
    if numel == 0:
        return signs, signs
    whole_turns, rest = divmod(world_size, numel)
    sums = torch.cat([torch.zeros(1), signs, signs]).double().cumsum(0)
    window = sums[numel + 1 :] - sums[numel + 1 - rest : 2 * numel + 1 - rest]
    return signs.roll(rank), window + whole_turns * signs.sum()


def _count_wrong(bucket: Tensor, total: Tensor, world_size: int, options: argparse.Namespace) -> int:
    """Count elements that differ from the sum, exact if the wire dtype has all integers up to P."""
    eps = torch.finfo(_wire(options) or _DTYPES[options.dtype]).eps
    tolerance = 0.0 if world_size * eps <= 2 else world_size * eps
    return int(((bucket.cpu().double() - total).abs() > tolerance).sum())


if __name__ == "__main__":
    sys.exit(main())
