"""The traffic of all-reduces as textbooks give it, beside what the schedules move."""

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
    """A formula, in messages of N bytes and P ranks.

    Attributes:
        of: the ranks and the direction that the formula counts.
        counted: the same from the schedules' traffic, in bytes; None if a schedule has no such count.
        remark: how the formula may be misread.
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
        "the root also sends as much, which the formula leaves out: 2(P-1)N in total",
    ),
    "ring": Classic(
        "2N(P-1)/P",
        lambda p: 2 * (p - 1) / p,
        "each rank, sent",
        lambda t: max(t.sent),
        "each rank receives as much at the same time; 2(P-1)N in total, like the master and its workers",
    ),
    "tree": Classic(
        "N log2 P",
        log2,
        "one way along the longest path, from leaf to root",
        None,
        "a time, not a rank's traffic: a rank sends to its parent and at most two children (a host's first "
        "rank to two more), 2(P-1)N in total",
    ),
    "halving_doubling": Classic(
        "2N(P-1)/P",
        lambda p: 2 * (p - 1) / p,
        "each rank, sent",
        lambda t: max(t.sent),
        "for P a power of two; else the excess ranks send N more, and some of the others, too",
    ),
    "hierarchical": Classic(
        "2N(P-1)/P",
        lambda p: 2 * (p - 1) / p,
        "each rank, sent",
        lambda t: max(t.sent),
        "over each host's link only 2N(H-1)/H with H hosts, in each direction",
    ),
}


def table(hosts: Sequence[int], num_bytes: int, servers: Sequence[int]) -> str:
    """The table as text; a parameter server is counted for each number in `servers`."""
    hosts = Hosts.of(hosts)  # hashed once, not for each rank's schedule
    world_size, numel = len(hosts), num_bytes // _ITEMSIZE
    lines = [
        f"N = {num_bytes / 1e6:g} MB, P = {world_size} ranks on {max(hosts) + 1} hosts; all numbers in MB",
        "",
        f"{'algorithm':<18}{'formula':<11}{'gives':>8}{'counted':>9}{'rank':>9}{'root':>9}{'total':>9}"
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
            "servers: each sends as much to workers, and to other servers; a server computes no gradients"
        )
    lines += ["", "rank, root: the most that any rank, and rank 0, sends; total: what all ranks send."]
    return "\n".join([*lines, *remarks])


def _columns(sent: Sequence[int]) -> str:
    return "".join(f"{value / 1e6:>9.1f}" for value in (max(sent), sent[0], sum(sent)))
