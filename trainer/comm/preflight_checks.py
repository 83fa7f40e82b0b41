"""The checks of the preflight: operations on known values, and the speed of links and CPUs."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainer import accelerator
from trainer.accelerator import is_accelerator
from trainer.distributed.collectives import all_gather_single, reduce_scatter_single

_LENGTH = 1031  # elements: more than one packet; a prime number
_BLOCK_BYTES = 1 << 20  # the size of each message when throughput is measured
_TURN_S = 0.1
_TURNS = 3
_SHORT = 100  # number of 8-byte messages when latency is measured
# Segments, and fp32 elements of one: more than a cache holds. On a GPU a launch takes as long as 1 MiB.
_SEGMENTS, _GPU_SEGMENTS = (64, 1 << 18), (16, 1 << 24)


@dataclass(frozen=True)
class GroupRank:
    """A rank, the device of its tensors, and the process group that it uses (None: the default group).

    `control` is a gloo group of all ranks, for barriers.
    """

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None

    def data(self, rank: int) -> Tensor:
        """Return the contribution of `rank`, (1031,) float64, whose sums are exact at any world size."""
        index = torch.arange(1, _LENGTH + 1, dtype=torch.float64, device=self.device)
        return (rank + 1) * torch.where(index % 2 == 0, index, -index)

    def blank(self, *shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=torch.float64, device=self.device)

    def finish(self) -> None:
        """Wait for the queued work of a GPU."""
        accelerator.synchronize(self.device)

    def barrier(self) -> None:
        """Wait for all ranks through gloo, which fails after the timeout; NCCL may wait for an hour."""
        dist.barrier(self.control)


OPERATIONS = (
    *("isend, irecv", "broadcast", "gather", "all_reduce", "all_gather"),
    *("reduce_scatter", "all_to_all"),
)


def check(operation: str, me: GroupRank) -> str:
    """Run `operation`; return the first difference from the known result, or "" if there is none."""
    got, wanted = _made(operation, me)
    differs = (got != wanted).flatten().cpu()  # waits for a GPU
    if not differs.any():
        return ""
    index = int(differs.nonzero()[0])
    found, known = got.flatten()[index].item(), wanted.flatten()[index].item()
    return f"element {index} is {found:g}, but should be {known:g}"


def _made(operation: str, me: GroupRank) -> tuple[Tensor, Tensor]:
    """Run the operation, with the last rank as its root; return this rank's and the expected result."""
    mine, everyones = me.data(me.rank), torch.stack([me.data(rank) for rank in range(me.world_size)])
    left, right, root = (me.rank - 1) % me.world_size, (me.rank + 1) % me.world_size, me.world_size - 1
    is_root, group, got, nothing = me.rank == root, me.group, me.blank(_LENGTH), (mine[:0], mine[:0])
    # Part p of rank r is data(r) + p, so a part on the wrong rank is detected.
    parts = torch.stack([mine + part for part in range(me.world_size)])
    match operation:
        case "isend, irecv":  # both directions at once; with two ranks, only the order tells left from right
            both = me.blank(2, _LENGTH)
            transfers = [
                dist.P2POp(dist.isend, mine, right, group),
                dist.P2POp(dist.isend, mine + 0.5, left, group),
                dist.P2POp(dist.irecv, both[0], left, group),
                dist.P2POp(dist.irecv, both[1], right, group),
            ]
            for work in dist.batch_isend_irecv(transfers):
                work.wait()
            return both, torch.stack([me.data(left), me.data(right) + 0.5])
        case "broadcast":
            dist.broadcast(mine, root, group)
            return mine, everyones[root]
        case "gather":
            rows = me.blank(me.world_size, _LENGTH)
            dist.gather(mine, list(rows) if is_root else None, root, group)
            return (rows, everyones) if is_root else nothing
        case "all_reduce":
            sums, most = mine.clone(), mine.clone()
            dist.all_reduce(sums, group=group)
            dist.all_reduce(most, dist.ReduceOp.MAX, group)
            return torch.stack([sums, most]), torch.stack([everyones.sum(0), everyones.amax(0)])
        case "all_gather":
            rows = me.blank(me.world_size, _LENGTH)
            all_gather_single(rows.view(-1), mine, group)
            return rows, everyones
        case "reduce_scatter":
            reduce_scatter_single(got, parts.flatten(), group)
            return got, everyones.sum(0) + me.rank * me.world_size
        case "all_to_all":
            rows = me.blank(me.world_size, _LENGTH)
            dist.all_to_all_single(rows, parts, group=group)
            return rows, everyones + me.rank
    raise AssertionError(operation)


def rounds(num_hosts: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of pairs of hosts; each pair occurs once, and each host at most once in a round.

    This is the circle method of a round-robin tournament: N - 1 rounds for an even N, and N for an odd N.
    """
    circle = list(range(num_hosts + num_hosts % 2))  # if the number is odd, one host rests in each round
    half = len(circle) // 2
    for _ in circle[1:]:
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [pair for pair in pairs if num_hosts not in pair]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def measure_links(
    me: GroupRank, pairs: Iterable[tuple[int, int]], ranks_by_host: Sequence[Sequence[int]]
) -> list[dict[str, float]]:
    """Measure links in both directions between the first ranks of two hosts, or between two ranks on a host.

    This is a collective of all ranks. The pairs are measured at the same time, so no host may be in two
    pairs. Each rank returns the links that start at it.
    """
    found: list[dict[str, float]] = []
    for pair in pairs:
        for source, target in dict.fromkeys((pair, pair[::-1])):
            start, end = ranks_by_host[source][0], ranks_by_host[target][int(source == target)]
            if me.rank == start:
                found.append({"source": source, "target": target, **_link(me, end, leads=True)})
            elif me.rank == end:
                _link(me, start, leads=False)
    me.barrier()
    return found


def _link(me: GroupRank, peer: int, leads: bool) -> dict[str, float]:
    token, block = me.blank(1), torch.empty(_BLOCK_BYTES, dtype=torch.uint8, device=me.device)

    def move(message: Tensor, sends: bool) -> None:
        (dist.send if sends else dist.recv)(message, peer, me.group)

    def stream_s(message: Tensor, count: int) -> float:
        """Return the time until the leader knows that `count` messages have arrived."""
        began = time.perf_counter()
        for _ in range(count):
            move(message, leads)
        move(token, not leads)
        me.finish()
        return time.perf_counter() - began

    # A process that waits for a GPU spins, so the CPU time of a transfer isn't known there.
    on_gpu, began = is_accelerator(me.device), time.process_time()
    round_trips = sorted(stream_s(token, 1) for _ in range(_SHORT))
    message_s = stream_s(token, _SHORT) / _SHORT if on_gpu else (time.process_time() - began) / (2 * _SHORT)
    count = torch.tensor([min(256, max(1, round(_TURN_S / stream_s(block, 1))))], device=me.device)
    move(count, leads)  # the two sides measure different times, but must agree on the count
    blocks = int(count.item())
    turns = _TURNS if blocks > 1 else 1  # over a slow link, a single block takes long enough to be measured
    began = time.process_time()
    fastest_s = min(stream_s(block, blocks) for _ in range(turns))
    busy_s = 0.0 if on_gpu else time.process_time() - began
    return {
        "latency_us": round_trips[_SHORT // 4] / 2 * 1e6,  # one way
        "gbit_s": blocks * _BLOCK_BYTES / fastest_s * 8e-9,
        "processor_s_per_byte": busy_s / (turns * blocks * _BLOCK_BYTES),
        "message_us": message_s * 1e6,
    }


def measure_costs(me: GroupRank) -> dict[str, float]:
    """Return the CPU time per byte copied and per byte added while all ranks work, and the processor count.

    On a GPU, this measures wall time. On a CPU, it measures CPU time, which other programs hardly change.
    """
    on_gpu = is_accelerator(me.device)
    clock = time.perf_counter if on_gpu else time.thread_time
    segments = torch.ones(_GPU_SEGMENTS if on_gpu else _SEGMENTS, device=me.device)
    slot, costs = torch.zeros_like(segments[0]), {"parallelism": float(len(os.sched_getaffinity(0)))}
    work: dict[str, Callable[[Tensor], object]] = {"copy": slot.copy_, "add": lambda part: part.add_(slot)}
    for name, one in work.items():
        me.barrier()
        times = []
        for _ in range(_TURNS):
            started = clock()
            for segment in segments:
                one(segment)
            me.finish()
            times.append(clock() - started)
        costs[f"{name}_s_per_byte"] = min(times) / segments.nbytes
    return costs
