"""Measures the links within and between hosts, by messages between pairs of ranks."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer.comm.network.checks import GroupRank
from trainer.comm.network.costs import finish

_MESSAGE_BYTES = 1 << 20
_ROUND_TRIPS = 100
_STREAM_S = 0.1  # approximate duration of a stream
_STREAMS = 3


@dataclass(frozen=True)
class LinkSpeed:
    """From one host to another, or from one process to another within a host."""

    source: int  # host
    target: int  # host
    latency_us: float  # one way: half a round trip of 8 bytes, of the fastest quarter
    gbit_s: float  # payload of one stream of 1 MiB messages, the fastest of several


def pairings(count: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds in which every two of `count` players meet once, none twice in a round (circle method)."""
    players: list[int | None] = [*range(count), *([None] * (count % 2))]
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        players.insert(1, players.pop())


def measure_links(me: GroupRank, ranks_by_host: Sequence[Sequence[int]]) -> list[LinkSpeed]:
    """Measure all pairs of hosts both ways, first rank to first rank, and one pair within each host.

    A collective over all ranks. Pairs of one round run at the same time; no host is in two of them.

    Returns:
        The links that start at this rank; empty on ranks that measure none.
    """
    found = []
    within = [(ranks[0], ranks[1], host, host) for host, ranks in enumerate(ranks_by_host) if len(ranks) > 1]
    across = (
        [(ranks_by_host[a][0], ranks_by_host[b][0], a, b) for a, b in pairs]
        for pairs in pairings(len(ranks_by_host))
    )
    for pairs in (within, *across):
        for source, target, source_host, target_host in pairs:
            if me.rank in (source, target):
                found += _both_ways(me, source, target, source_host, target_host)
        dist.barrier()
    return found


def _both_ways(me: GroupRank, a: int, b: int, host_a: int, host_b: int) -> list[LinkSpeed]:
    links = []
    for source, target, hosts in ((a, b, (host_a, host_b)), (b, a, (host_b, host_a))):
        leads, peer = me.rank == source, target if me.rank == source else source
        latency_s = _latency_s(me, peer, leads)
        bytes_per_s = _bytes_per_s(me, peer, leads)
        if leads:
            links.append(LinkSpeed(*hosts, latency_us=latency_s * 1e6, gbit_s=bytes_per_s * 8e-9))
    return links


def _latency_s(me: GroupRank, peer: int, leads: bool) -> float:
    token = me.blank(1)
    times = []
    for _ in range(_ROUND_TRIPS):
        started = time.perf_counter()
        for sends in (leads, not leads):
            if sends:
                dist.send(token, peer)
            else:
                dist.recv(token, peer)
        finish(me)
        times.append(time.perf_counter() - started)
    return sorted(times)[_ROUND_TRIPS // 4] / 2


def _bytes_per_s(me: GroupRank, peer: int, leads: bool) -> float:
    message = torch.empty(_MESSAGE_BYTES, dtype=torch.uint8, device=me.device)
    first_s = _stream_s(me, peer, leads, message, 1)
    count = torch.tensor([min(256, max(1, round(_STREAM_S / first_s)))], device=me.device)
    if leads:  # the two sides measure different times, but must agree on the count
        dist.send(count, peer)
    else:
        dist.recv(count, peer)
    messages = int(count.item())
    fastest_s = min(_stream_s(me, peer, leads, message, messages) for _ in range(_STREAMS))
    return messages * _MESSAGE_BYTES / fastest_s


def _stream_s(me: GroupRank, peer: int, leads: bool, message: torch.Tensor, count: int) -> float:
    """Time until `count` messages have all arrived."""
    arrived = me.blank(1)
    started = time.perf_counter()
    for _ in range(count):
        if leads:
            dist.send(message, peer)
        else:
            dist.recv(message, peer)
    if leads:
        dist.recv(arrived, peer)
    else:
        finish(me)
        dist.send(arrived, peer)
    finish(me)
    return time.perf_counter() - started
