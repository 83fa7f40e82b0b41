"""Textbook formulas for the traffic of all-reduces, compared with the schedules' traffic."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log2

from planner.push_pull import exchange
from planner.traffic import Traffic, count_traffic
from trainer.comm.algorithms.all_reduce import build
from trainer.comm.algorithms.rank_order import Hosts

_ITEMSIZE = 4


@dataclass(frozen=True)
class Classic:
    """A formula for messages of N bytes and P ranks.

    Attributes:
        formula: the formula as text.
        value: its value for P ranks, as a multiple of N.
        of: the ranks and the direction (sent or received) of the traffic that the formula counts.
        counted: the same traffic, counted in the schedules; None if the schedules do not show it.
        remark: how the formula may be misunderstood.
    """

    formula: str
    value: Callable[[int], float]
    of: str
    counted: Callable[[Traffic], float] | None
    remark: str


CLASSIC = {
    "master_worker": Classic(
        "(P-1)N",
        lambda p: p - 1,
        "the root, received",
        lambda t: t.received[0],
        "the root also sends (P-1)N, which the formula does not count: 2(P-1)N in total",
    ),
    "ring": Classic(
        "2N(P-1)/P",
        lambda p: 2 * (p - 1) / p,
        "each rank, sent",
        lambda t: max(t.sent),
        "each rank receives the same amount at the same time; 2(P-1)N in total, like master_worker",
    ),
    "tree": Classic(
        "N log2 P",
        log2,
        "along the longest path from a leaf to the root",
        None,
        "this is a time, not the traffic of a rank: a rank sends to its parent and at most two children (the "
        "first rank of a host to two more), 2(P-1)N in total",
    ),
    "halving_doubling": Classic(
        "2N(P-1)/P",
        lambda p: 2 * (p - 1) / p,
        "each rank, sent",
        lambda t: max(t.sent),
        "if P is a power of two; otherwise, the excess ranks and some other ranks send N more",
    ),
    "hierarchical": Classic(
        "2N(P-1)/P",
        lambda p: 2 * (p - 1) / p,
        "each rank, sent",
        lambda t: max(t.sent),
        "over each host's link only 2N(H-1)/H in each direction, for H hosts",
    ),
}


def table(hosts: Sequence[int], num_bytes: int, servers: Sequence[int]) -> str:
    """Return the table as text, with a row for each number of parameter servers in `servers`."""
    hosts = Hosts.of(hosts)  # cached by its hash, which is computed once
    world_size, numel = len(hosts), num_bytes // _ITEMSIZE
    lines = [
        f"N = {num_bytes / 1e6:g} MB, P = {world_size} ranks on {max(hosts) + 1} hosts; all numbers in MB",
        "",
        f"{'algorithm':<18}{'formula':<11}{'value':>8}{'counted':>9}{'rank':>9}{'root':>9}{'total':>9}"
        "  the formula counts",
    ]
    remarks = []
    for name, classic in CLASSIC.items():
        traffic = count_traffic([build(name, r, hosts) for r in range(world_size)], hosts, numel, _ITEMSIZE)
        counted = "-" if classic.counted is None else f"{classic.counted(traffic) / 1e6:.1f}"
        lines.append(
            f"{name:<18}{classic.formula:<11}{classic.value(world_size) * num_bytes / 1e6:>8.1f}{counted:>9}"
            f"{_columns(traffic.sent)}  {classic.of}"
        )
        remarks.append(f"{name}: {classic.remark}")
    for count in servers:
        push, pull = exchange(range(count), range(count, world_size))
        workers = world_size - count
        up = count_traffic(push, hosts, numel, _ITEMSIZE)
        down = count_traffic(pull, hosts, numel, _ITEMSIZE)
        sent = [pushed + pulled for pushed, pulled in zip(up.sent, down.sent, strict=True)]
        lines.append(
            f"{f'{count} servers':<18}{'WN/S':<11}{workers * num_bytes / count / 1e6:>8.1f}"
            f"{max(up.received) / 1e6:>9.1f}{_columns(sent)}  each server, received from W = {workers}"
        )
    if servers:
        remarks.append(
            "servers: each sends the same amount to workers, and to other servers; servers compute no "
            "gradients"
        )
    lines += [
        "",
        "rank: the most that any rank sends; root: what rank 0 sends; total: the sum over all ranks.",
    ]
    return "\n".join([*lines, *remarks])


def _columns(sent: Sequence[int]) -> str:
    return "".join(f"{value / 1e6:>9.1f}" for value in (max(sent), sent[0], sum(sent)))
