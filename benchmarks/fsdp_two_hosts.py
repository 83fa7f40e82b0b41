"""Step time of a GPT and an MLP under FSDP between hosts on slow links, by comm=, compared with torch's own.

    python -m benchmarks.fsdp_two_hosts [--hosts 2] [--per-host 4] [--rate 1gbit] [--steps 2] [--turns 5]

Hosts are network namespaces, so this needs root. The variants run in rotation, a few steps each, several
times; a ratio is the median over rounds of a variant's time to native's in the same round. `ahead` gathers
one unit ahead, as strategy.prefetch_units=1 does. Communication is rank 0's, per step: hidden behind
computation, or exposed. On CPUs torch's own blocks the computation, so all of it is exposed. `MB` is what the
first host sent per step, by the counter of its interface.
"""

import argparse
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from models.gpt import GPT
from models.mlp import MLP
from tests.hosts import hosts as network
from tests.ranks import run_ranks
from trainer.comm.fsdp_collectives import ShardComm, attach

VARIANTS: dict[str, dict[str, Any]] = {
    "native": {},
    "native, ahead": {"ahead": True},
    "ring, ahead": {"algorithm": "ring", "ahead": True},
    "halving_doubling, ahead": {"algorithm": "halving_doubling", "ahead": True},
    "hierarchical": {"algorithm": "hierarchical"},
    "hierarchical, ahead": {"algorithm": "hierarchical", "ahead": True},
    "hierarchical, ahead, bf16 wire": {"algorithm": "hierarchical", "ahead": True, "wire_dtype": "bf16"},
}


class Timed:
    """torch's own collective, and how long it has blocked the computation."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run, self.seconds = run, 0.0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any = None,
        async_op: bool = False,
    ) -> None:
        began = time.perf_counter()
        self.run(output_tensor, input_tensor, group=group, **({} if op is None else {"op": op}))
        self.seconds += time.perf_counter() - began


@dataclass
class Variant:
    model: nn.Module
    batch: tuple[torch.Tensor, torch.Tensor]
    comm: ShardComm | None
    timed: list[Timed]
    optimizer: torch.optim.Optimizer
    sent: list[int] = field(default_factory=list)

    def seconds(self, steps: int, interface: str) -> float:
        """The mean time of a step on the slowest rank."""
        before = _sent(interface)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            with self.comm.one_pass() if self.comm is not None else nullcontext():
                logits = self.model(self.batch[0]).flatten(0, -2)
                nn.functional.cross_entropy(logits, self.batch[1].flatten()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        slowest = torch.tensor([(time.perf_counter() - began) / steps])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        self.sent.append((_sent(interface) - before) // steps)
        return float(slowest)

    def metrics(self, steps: int) -> dict[str, float]:
        """Milliseconds of communication per step since the last call."""
        if self.comm is not None:
            return self.comm.timeline.metrics()
        gather, scatter = (1e3 * timed.seconds / steps for timed in self.timed)
        for timed in self.timed:
            timed.seconds = 0.0
        return {
            "comm/total_ms": gather + scatter,
            "comm/hidden_ms": 0.0,
            "comm/exposed_ms": gather + scatter,
            "comm/all_gather_exposed_ms": gather,
            "comm/reduce_scatter_exposed_ms": scatter,
        }


def _sent(interface: str) -> int:
    """Bytes that this process's host has sent so far; call it while no rank sends."""
    dist.barrier()
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    fields = next(line.split() for line in lines if line.strip().startswith(f"{interface}:"))
    dist.barrier()
    return int(fields[9])


def model_and_batch(kind: str) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """About 4 million parameters, 16 MB, in units of 3 to 4 MB; a batch takes about as long as they do."""
    torch.manual_seed(0)
    if kind == "mlp":
        model = MLP((784,), 10, hidden=[1024] * 4)
        torch.manual_seed(dist.get_rank())
        return model, (torch.randn(64, 784), torch.randint(0, 10, (64,)))
    gpt = GPT(vocab_size=512, block_size=64, width=256, depth=5, num_heads=4)
    torch.manual_seed(dist.get_rank())
    return gpt, (torch.randint(0, 512, (4, 64)), torch.randint(0, 512, (4, 64)))


def make(name: str, kind: str, hosts: list[int]) -> Variant:
    options = dict(VARIANTS[name])
    ahead, algorithm = options.pop("ahead", False), options.pop("algorithm", None)
    model, batch = model_and_batch(kind)
    mesh = init_device_mesh("cpu", (len(hosts),), mesh_dim_names=("shard",))
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    units = getattr(model, "fsdp_units", None) or linear
    for unit in units:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if ahead:
        for unit, following in itertools.pairwise(sharded):
            unit.set_modules_to_forward_prefetch([following])
    comm, timed = None, [Timed(dist.all_gather_into_tensor), Timed(dist.reduce_scatter_tensor)]
    if algorithm is not None:
        comm = attach(
            model,
            algorithm,
            group=mesh.get_group(),
            hosts=hosts,
            device=torch.device("cpu"),
            timeout_s=300,
            **options,
        )
    for unit in sharded if algorithm is None else []:
        unit.set_custom_all_gather(timed[0])  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(timed[1])  # type: ignore[arg-type]
    return Variant(model, batch, comm, timed, torch.optim.SGD(model.parameters(), lr=0.01))


def measure(
    kind: str, hosts: list[int], interface: str, steps: int, turns: int
) -> dict[str, dict[str, float]]:
    """Milliseconds per step, ratio to native, and milliseconds of communication, by variant."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # logits are a view, but not changed
    variants = {name: make(name, kind, hosts) for name in VARIANTS}
    for variant in variants.values():
        variant.seconds(2, interface)  # opens connections, compares layouts
        variant.metrics(1)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(turns):
        for name, variant in variants.items():
            times[name].append(variant.seconds(steps, interface))
    found = {}
    for name, variant in variants.items():
        ratios = [own / native for own, native in zip(times[name], times["native"], strict=True)]
        found[name] = {"ms": 1e3 * statistics.median(times[name]), "ratio": statistics.median(ratios)}
        found[name] |= variant.metrics(steps * turns) | {"MB": statistics.median(variant.sent[1:]) / 1e6}
        if variant.comm is not None:
            variant.comm.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="gpt,mlp")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--steps", type=int, default=2, help="per turn (2)")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    indices = [rank // args.per_host for rank in range(args.hosts * args.per_host)]
    for kind in args.models.split(","):
        with network(args.hosts, args.rate) as places:
            at = [places[index] for index in indices]
            work = (kind, indices, places[0].interface, args.steps, args.turns)
            found = run_ranks(measure, len(indices), *work, hosts=at, timeout_s=1200)[0]
        print(f"{kind} at {args.hosts} x {args.per_host} ranks, links {args.rate}")
        columns = ("comm ms", "hidden", "exposed", "gathers", "scatters", "MB")
        print(f"{'':32} {'ms/step':>8} {'x native':>8} {' '.join(f'{name:>8}' for name in columns)}")
        for name, row in found.items():
            keys = ("total", "hidden", "exposed", "all_gather_exposed", "reduce_scatter_exposed")
            comm = " ".join(f"{row[f'comm/{key}_ms']:8.1f}" for key in keys)
            print(f"{name:32} {row['ms']:8.1f} {row['ratio']:8.2f} {comm} {row['MB']:8.1f}")
        print("gathers, scatters: the exposed part of each")


if __name__ == "__main__":
    main()
