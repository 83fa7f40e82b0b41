"""Measures what a byte costs the processors of a host: to copy, to add, and to send over the network.

On a CPU the clock is processor time, which other programs on the machine hardly change; on a GPU it is wall
time. All processes of all hosts work at once, as in an all-reduce, and share caches and memory.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer.comm.network.checks import GroupRank

# fp32 elements of a segment, and segments: more than a cache holds. On a CPU 1 MiB, as in an all-reduce; on a
# GPU, which copies that in less time than a launch takes, 64 MiB: 16 of them, 1 GiB.
_SEGMENTS = {"cpu": (1 << 18, 24), "cuda": (1 << 24, 16)}
_TURN_S = 0.1
_TURNS = 3
_STREAM_BYTES = 2 << 20
_BURST = 200  # messages
_CROWD = 4  # hosts that each host sends to
_CROWD_S = 0.2


@dataclass(frozen=True)
class Costs:
    """Seconds of one processor, except `parallelism`; medians of several runs, means over hosts."""

    copy_s_per_byte: float
    add_s_per_byte: float  # fp32
    network_s_per_byte: float  # sent or received, between hosts; the kernel's work for the process
    message_s: float  # to send or receive a message of any length
    parallelism: float  # processors available to the processes of a host when all work
    crowded_bytes_per_s: float = 0.0  # of a host's link while it sends to and receives from several

    def __str__(self) -> str:
        copy, add = 1e-9 / self.copy_s_per_byte, 1e-9 / self.add_s_per_byte
        network, message = self.network_s_per_byte * 1e9, self.message_s * 1e6
        return (
            f"processors: {self.parallelism:.1f} for each host; one copies {copy:.1f} GB/s, "
            f"adds {add:.1f} GB/s,\n"
            f"takes {network:.2f} s for a GB over the network and {message:.0f} us for a message"
        )


def measure_costs(me: GroupRank, ranks_by_host: Sequence[Sequence[int]]) -> Costs:
    """Measure the costs (a collective over all ranks, with the same result on all)."""
    size, count = _SEGMENTS[me.device.type]
    segments = torch.ones(count * size, device=me.device).chunk(count)
    slot = torch.zeros(size, device=me.device)

    copy_s, processors = _median(me, lambda: _turn(me, lambda segment: slot.copy_(segment), segments))
    add_s, _ = _median(me, lambda: _turn(me, lambda segment: segment.add_(slot), segments))
    (network_s,) = _median(me, lambda: _exchange(me, [ranks[0] for ranks in ranks_by_host]))
    (message_s,) = _median(me, lambda: _burst(me))
    crowded = _crowd(me, [ranks[0] for ranks in ranks_by_host])

    # Processors are summed over the ranks of a host; a cost is a mean over the ranks that measured it.
    found = torch.tensor([copy_s, add_s, network_s, message_s, crowded, processors], dtype=torch.float64)
    table = torch.stack([found, (found > 0).double()]).to(me.device)
    dist.all_reduce(table)
    sums, counts = table.cpu()
    copy_s, add_s, network_s, message_s, crowded, _ = (sums / counts.clamp(min=1)).tolist()
    return Costs(copy_s, add_s, network_s, message_s, sums[-1].item() / len(ranks_by_host), crowded)


def _median(me: GroupRank, turn: Callable[[], tuple[float, ...]]) -> list[float]:
    turns = []
    for _ in range(_TURNS):
        dist.barrier()
        turns.append(turn())
    return torch.tensor(turns, dtype=torch.float64).median(0).values.tolist()


def _turn(
    me: GroupRank, work: Callable[[torch.Tensor], torch.Tensor], segments: Sequence[torch.Tensor]
) -> tuple[float, float]:
    """(seconds per byte, processors this process got)."""
    on_gpu = me.device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.thread_time
    began, started, num_bytes = time.perf_counter(), clock(), 0
    while time.perf_counter() - began < _TURN_S:
        for segment in segments:
            work(segment)
            num_bytes += segment.nbytes
        finish(me)
    spent = clock() - started
    return spent / num_bytes, 1.0 if on_gpu else spent / (time.perf_counter() - began)


def _exchange(me: GroupRank, ring: Sequence[int]) -> tuple[float]:
    """Seconds per byte of this process's processors while each host sends to the next; 0 for others."""
    if len(ring) < 2 or me.rank not in ring:
        return (0.0,)
    position = ring.index(me.rank)
    outgoing, incoming = torch.zeros(2, _STREAM_BYTES, dtype=torch.uint8, device=me.device)
    started = time.process_time()
    transfers = [
        dist.P2POp(dist.isend, outgoing, ring[(position + 1) % len(ring)]),
        dist.P2POp(dist.irecv, incoming, ring[position - 1]),
    ]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    finish(me)
    # A process that waits for a GPU spins; its processor time is not the transfer's.
    spent = 0.0 if me.device.type == "cuda" else time.process_time() - started
    return (spent / (2 * _STREAM_BYTES),)


def _crowd(me: GroupRank, hosts: Sequence[int]) -> float:
    """Bytes per second that a host sends to several others while as many send to it; 0 on other ranks.

    The two directions and the streams slow each other: each acknowledgement waits behind data, and streams
    that meet at one host leave their own links idle. Returns the fastest of several runs.
    """
    if len(hosts) < 3:
        return 0.0
    peers = min(_CROWD, len(hosts) - 1)
    position = hosts.index(me.rank) if me.rank in hosts else None
    message, count, fastest = torch.zeros(1 << 20, dtype=torch.uint8, device=me.device), 1, 0.0
    for _ in range(1 + _TURNS):
        dist.barrier()
        began = time.perf_counter()
        if position is not None:
            got = torch.empty(peers, count, message.numel(), dtype=torch.uint8, device=me.device)
            transfers = [
                transfer
                for number in range(count)
                for k in range(1, peers + 1)
                for transfer in (
                    dist.P2POp(dist.isend, message, hosts[(position + k) % len(hosts)]),
                    dist.P2POp(dist.irecv, got[k - 1, number], hosts[position - k]),
                )
            ]
            for work in dist.batch_isend_irecv(transfers):
                work.wait()
        finish(me)
        slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device=me.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        fastest = max(fastest, peers * count * message.numel() / slowest.item())
        count = max(1, min(16, round(_CROWD_S * fastest / message.numel() / peers)))  # on all ranks alike
    return fastest if position is not None else 0.0


def _burst(me: GroupRank) -> tuple[float]:
    """Seconds per message of this process's processors, over many short messages with its neighbours."""
    if me.world_size < 2:
        return (0.0,)
    clock = time.perf_counter if me.device.type == "cuda" else time.process_time
    tokens = torch.zeros(2 * _BURST, 2, device=me.device)
    started = clock()
    transfers = [
        transfer
        for i in range(0, 2 * _BURST, 2)
        for transfer in (
            dist.P2POp(dist.isend, tokens[i], me.right),
            dist.P2POp(dist.irecv, tokens[i + 1], me.left),
        )
    ]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    finish(me)
    return ((clock() - started) / (2 * _BURST),)


def finish(me: GroupRank) -> None:
    """Wait for queued work on a GPU; a CPU queues none."""
    if me.device.type == "cuda":
        torch.cuda.synchronize(me.device)
