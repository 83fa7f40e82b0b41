"""Measure the step time of ResNet-18 with DDP between hosts with slow links, for several all-reduces.

    python -m benchmarks.ddp_overlap [--hosts 2] [--per-host 4] [--rate 1gbit] [--batch 4] [--steps 4]

Hosts are network namespaces, so this requires root. The variants run in rotation, a few steps each, several
times. A ratio is the median over rounds of a variant's time divided by that of torch's DDP in the same round.
`one bucket` has a single bucket, which is complete only after the backward pass, so that nothing overlaps.
`no all-reduce` is the step without communication.
"""

import argparse
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18

from tests.hosts import hosts as network
from tests.ranks import run_ranks
from trainer.comm.ddp_hook import CommHook, attach

VARIANTS: dict[str, dict[str, Any]] = {
    "torch's DDP": {},
    "no all-reduce": {},
    "native": {"algorithm": "native"},
    "ring": {"algorithm": "ring"},
    "hierarchical": {"algorithm": "hierarchical"},
    "hierarchical, one bucket": {"algorithm": "hierarchical", "bucket_cap_mb": 1000},
    "hierarchical, bf16 wire": {"algorithm": "hierarchical", "wire_dtype": "bf16"},
}


@dataclass
class Variant:
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    hook: CommHook | None
    skips_all_reduce: bool

    def seconds(self, steps: int, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        """Return the mean time of a step on the slowest rank."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            with self.model.no_sync() if self.skips_all_reduce else nullcontext():
                nn.functional.cross_entropy(self.model(batch[0]), batch[1]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        slowest = torch.tensor([(time.perf_counter() - start) / steps])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)


def create(name: str, hosts: list[int]) -> Variant:
    torch.manual_seed(0)
    options = dict(VARIANTS[name])
    cap = options.pop("bucket_cap_mb", 25)
    model = DistributedDataParallel(resnet18(num_classes=10), bucket_cap_mb=cap, gradient_as_bucket_view=True)
    hook = attach(model, **options, hosts=hosts, timeout_s=120) if options else None
    return Variant(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True),
        hook,
        name == "no all-reduce",
    )


def measure(hosts: list[int], batch_size: int, steps: int, turns: int) -> dict[str, dict[str, float]]:
    """Return ms per step, ratio to torch's DDP, and ms of communication, by variant."""
    variants = {name: create(name, hosts) for name in VARIANTS}
    batch = torch.randn(batch_size, 3, 32, 32), torch.randint(0, 10, (batch_size,))
    for variant in variants.values():
        variant.seconds(2, batch)  # DDP rebuilds its buckets after the first step
        if variant.hook is not None:
            variant.hook.timeline.metrics()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(turns):
        for name, variant in variants.items():
            times[name].append(variant.seconds(steps, batch))
    found = {}
    for name, variant in variants.items():
        ratios = [own / torchs for own, torchs in zip(times[name], times["torch's DDP"], strict=True)]
        found[name] = {"ms": 1e3 * statistics.median(times[name]), "ratio": statistics.median(ratios)}
        if variant.hook is not None:
            found[name] |= variant.hook.timeline.metrics()
            variant.hook.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--batch", type=int, default=4, help="images per rank (4)")
    parser.add_argument("--steps", type=int, default=4, help="number of steps per turn (4)")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    indices = [rank // args.per_host for rank in range(args.hosts * args.per_host)]
    work = (indices, args.batch, args.steps, args.turns)
    with network(args.hosts, args.rate) as members:
        rank_hosts = [members[index] for index in indices]
        found = run_ranks(measure, len(indices), *work, hosts=rank_hosts, timeout_s=1200)[0]
    print(f"ResNet-18 on {args.hosts} x {args.per_host} ranks, {args.batch} images each, links {args.rate}")
    print(f"{'':26} {'ms/step':>8} {'x torch':>8} {'comm ms':>8} {'overlapped':>10} {'exposed':>8}")
    for name, row in found.items():
        comm = [
            f"{row.get(f'usage/comm/{key}_ms', float('nan')):8.1f}"
            for key in ("total", "overlapped", "exposed")
        ]
        print(f"{name:26} {row['ms']:8.1f} {row['ratio']:8.2f} {' '.join(comm)}")


if __name__ == "__main__":
    main()
