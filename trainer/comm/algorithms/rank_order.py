"""Find out which ranks share a host, and arrange ranks in lines and trees."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache


class Hosts(tuple[int, ...]):
    """The host of every rank, with a cached hash, for fast construction of thousands of ranks' schedules."""

    @classmethod
    def of(cls, hosts: Sequence[int]) -> "Hosts":
        return hosts if isinstance(hosts, cls) else cls(hosts)

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


@lru_cache(maxsize=16)
def by_host(hosts: Hosts) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host, in the order of the hosts' first ranks."""
    groups: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(host, []).append(rank)
    return tuple(tuple(ranks) for ranks in groups.values())


@lru_cache(maxsize=16)
def positions_in_hosts(hosts: Hosts) -> tuple[tuple[int, int], ...]:
    """Return each rank's (host, index within the host), both numbered as in `by_host`."""
    positions = {r: (h, i) for h, ranks in enumerate(by_host(hosts)) for i, r in enumerate(ranks)}
    return tuple(positions[rank] for rank in range(len(hosts)))


@lru_cache(maxsize=16)
def line(hosts: Hosts) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks host by host, so that most neighbours share a host, and each rank's index."""
    order = tuple(rank for ranks in by_host(hosts) for rank in ranks)
    return order, tuple(sorted(range(len(order)), key=order.__getitem__))


@dataclass(frozen=True, slots=True)
class TreePosition:
    parent: int | None
    children: tuple[int, ...]
    depth: int  # 0 at the root


@lru_cache(maxsize=16)
def tree(hosts: Hosts) -> tuple[TreePosition, ...]:
    """Return each rank's position in a tree of the hosts' first ranks, each the root of its host's ranks."""
    groups = by_host(hosts)
    leaders = [ranks[0] for ranks in groups]

    def position_of(host: int, index: int) -> TreePosition:
        local = groups[host]
        children = [local[i] for i in (2 * index + 1, 2 * index + 2) if i < len(local)]
        parent = local[(index - 1) // 2] if index > 0 else None
        if index == 0:
            children += [leaders[i] for i in (2 * host + 1, 2 * host + 2) if i < len(leaders)]
            parent = leaders[(host - 1) // 2] if host > 0 else None
        return TreePosition(parent, tuple(children), _heap_depth(host) + _heap_depth(index))

    return tuple(position_of(*position) for position in positions_in_hosts(hosts))


def _heap_depth(index: int) -> int:
    return (index + 1).bit_length() - 1
