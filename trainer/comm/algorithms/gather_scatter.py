"""All-gathers and reduce-scatters as data: every rank owns one block, all of the same length.

A reduce-scatter is its all-gather run backwards: where a block was copied away from its owner, the partial
sums come back the same way and are added, so the owner ends with the sum. It is correct because in an
all-gather each rank receives each other block exactly once, and it moves the same bytes. Source of the
duality: Chan, Heimlich, Purkayastha & van de Geijn, "Collective communication: theory, practice,
and experience", Concurrency and Computation 2007, section 3.

Each algorithm numbers parts so that what it sends together is adjacent; `Schedule.blocks` maps them to ranks.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate

from trainer.comm.algorithms.rank_order import Hosts, by_host, line, positions_in_hosts
from trainer.comm.algorithms.rank_order import tree as tree_of
from trainer.comm.algorithms.schedule import Collective, Kind, Op, Phase, Schedule, chosen, in_phases

_OPPOSITE = {Kind.SEND: Kind.ADD, Kind.COPY: Kind.SEND}


def all_gather(algorithm: str, rank: int, hosts: Sequence[int]) -> Schedule:
    """The all-gather of `rank` under the named algorithm: at the end it holds the blocks of all ranks.

    Args:
        hosts: the host index of every rank; ranks of one host need not be neighbours.

    Raises:
        ValueError: the algorithm or the rank does not exist.
    """
    found = chosen(ALL_GATHERS, Collective.ALL_GATHER, algorithm, rank, hosts)
    blocks, own, gather = found(rank, Hosts.of(hosts))
    return Schedule(len(hosts), (), (own, own + 1), gather, blocks)


def reduce_scatter(algorithm: str, rank: int, hosts: Sequence[int]) -> Schedule:
    """The reduce-scatter of `rank`: at the end it holds the sum of its own block (see `all_gather`)."""
    forth = all_gather(algorithm, rank, hosts)
    back = tuple(_backwards(phase) for phase in reversed(forth.gather))
    return Schedule(forth.parts, back, forth.owned, (), forth.blocks)


def _backwards(phase: Phase) -> Phase:
    last = phase.round(phase.repeat - 1)
    ops = tuple(Op(_OPPOSITE[op.kind], op.peer, op.begin, op.end) for op in last)
    return Phase(ops, phase.repeat, phase.ring, not phase.forward)


Found = tuple[tuple[int, ...], int, tuple[Phase, ...]]  # rank of each part's block, own part, rounds


def _ring(rank: int, hosts: Hosts) -> Found:
    """Each rank sends what it received last to its right neighbour: N(P-1)/P bytes sent, in P-1 rounds.

    Source: see `algorithms.ring`, of which this is the second half.
    """
    order, position_of = line(hosts)
    position = position_of[rank]
    return (
        order,
        position,
        _pass_on(order[position - 1], order[(position + 1) % len(order)], position, range(len(order) + 1)),
    )


def _pass_on(left: int, right: int, position: int, bounds: Sequence[int]) -> tuple[Phase, ...]:
    """A ring in which the rank at position i starts with the parts [bounds[i], bounds[i + 1])."""
    size = len(bounds) - 1

    def ops(number: int) -> tuple[Op, ...]:
        sent, got = (position - number) % size, (position - number - 1) % size
        send = Op(Kind.SEND, right, bounds[sent], bounds[sent + 1])
        return send, Op(Kind.COPY, left, bounds[got], bounds[got + 1])

    if size == 1:
        return ()
    if bounds[-1] - bounds[0] == size:  # equal bounds: one phase for any number of ranks
        return (Phase(ops(0), size - 1, (bounds[0], bounds[-1])),)
    return tuple(Phase(ops(number)) for number in range(size - 1))


def _tree(rank: int, hosts: Hosts) -> Found:
    """Blocks go up the tree of `algorithms.tree` to its root, and all come down again: 2 log2 P rounds.

    Each link carries up to N bytes either way, at least twice the minimum: for small units.
    """
    kin, (order, begins, ends, deepest) = tree_of(hosts), _subtrees(hosts)
    parent, children, depth = kin[rank].parent, kin[rank].children, kin[rank].depth
    up: list[list[Op]] = [[] for _ in range(deepest)]
    down: list[list[Op]] = [[] for _ in range(deepest)]
    for child in children:
        up[deepest - depth - 1].append(Op(Kind.COPY, child, begins[child], ends[child]))
        down[depth] += _all_but(Kind.SEND, child, begins[child], ends[child], (0, len(hosts)))
    if parent is not None:
        up[deepest - depth].append(Op(Kind.SEND, parent, begins[rank], ends[rank]))
        down[depth - 1] += _all_but(Kind.COPY, parent, begins[rank], ends[rank], (0, len(hosts)))
    return order, begins[rank], in_phases((*up, *down))


@lru_cache(maxsize=16)
def _subtrees(hosts: Hosts) -> tuple[tuple[int, ...], list[int], list[int], int]:
    """Ranks in preorder; by rank, the begin and end of its subtree in that order; the greatest depth."""
    kin = tree_of(hosts)
    order: list[int] = []
    begins, ends = [0] * len(hosts), [0] * len(hosts)
    waiting = [next(rank for rank, member in enumerate(kin) if member.parent is None)]
    while waiting:
        rank = waiting.pop()
        begins[rank] = len(order)
        order.append(rank)
        waiting += reversed(kin[rank].children)
    for rank in reversed(order):
        ends[rank] = ends[kin[rank].children[-1]] if kin[rank].children else begins[rank] + 1
    return tuple(order), begins, ends, max(member.depth for member in kin)


def _all_but(kind: Kind, peer: int, begin: int, end: int, parts: tuple[int, int]) -> list[Op]:
    """Moves of the parts [low, high), except those in [begin, end)."""
    low, high = parts
    return [Op(kind, peer, first, last) for first, last in ((low, begin), (end, high)) if first < last]


def _halving_doubling(rank: int, hosts: Hosts) -> Found:
    """Pairs exchange what they have, twice as much each time: log2 P rounds, N(P-1)/P bytes sent.

    The farthest partners start, with one block, so little crosses hosts. At other world sizes
    than powers of two, P - 2^k excess ranks send their block to a neighbour first, which sends them all the
    others last. Source: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations
    in MPICH", IJHPCA 2005, sections 4.1 and 4.3.
    """
    order, position_of = line(hosts)
    position, world_size = position_of[rank], len(hosts)
    levels = world_size.bit_length() - 1
    excess = world_size - (1 << levels)
    blocks, begins = _groups(hosts)

    # The first 2 * excess positions are pairs: the first computes, the second only sends data to it.
    folded = position < 2 * excess
    partner = order[position ^ 1] if folded else -1
    index = position // 2 if folded else position - excess
    group = _reversed_bits(index, levels)
    if folded and position % 2:
        own = begins[group] + 1
        idle = (Phase((), repeat=levels),) if levels else ()
        last = Phase(tuple(_all_but(Kind.COPY, partner, own, own + 1, (0, world_size))))
        return blocks, own, (Phase((Op(Kind.SEND, partner, own, own + 1),)), *idle, last)

    own = begins[group]
    rounds = []
    for level in reversed(range(levels)):
        other = index ^ (1 << level)
        peer, span = order[2 * other if other < excess else other + excess], 1 << (levels - 1 - level)
        low, theirs = group & -span, (group & -span) ^ span
        send = Op(Kind.SEND, peer, begins[low], begins[low + span])
        rounds.append(Phase((send, Op(Kind.COPY, peer, begins[theirs], begins[theirs + span]))))
    if excess:
        taken = (Op(Kind.COPY, partner, own + 1, own + 2),) if folded else ()
        given = _all_but(Kind.SEND, partner, own + 1, own + 2, (0, world_size)) if folded else ()
        rounds = [Phase(taken), *rounds, Phase(tuple(given))]
    return blocks, own, tuple(rounds)


@lru_cache(maxsize=16)
def _groups(hosts: Hosts) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ranks in the order of their parts, pairs side by side; and the part at which each group begins.

    Group g is the rank, or pair, whose index has the bits of g in reverse: groups that share the lowest bits,
    which exchange first, are adjacent.
    """
    order, _ = line(hosts)
    levels = len(order).bit_length() - 1
    excess = len(order) - (1 << levels)
    indices = [_reversed_bits(group, levels) for group in range(1 << levels)]
    groups = [order[2 * i : 2 * i + 2] if i < excess else (order[i + excess],) for i in indices]
    begins = (0, *accumulate(len(group) for group in groups))
    return tuple(rank for group in groups for rank in group), begins


def _reversed_bits(value: int, bits: int) -> int:
    return int(f"{value:0{bits}b}"[::-1], 2) if bits else 0


def _hierarchical(rank: int, hosts: Hosts) -> Found:
    """A ring across hosts for each index within a host, then all to all inside each host.

    Each host's link carries N(H-1)/H bytes for H hosts, the minimum, independent of the ranks that share it;
    a flat ring's carries N(P-1)/P. There are as many rings as the smallest host has ranks; further ranks of a
    larger host first send their block to a rank in a ring. Source: see `algorithms.hierarchical`.
    """
    groups = by_host(hosts)
    host, index = positions_in_hosts(hosts)[rank]
    local, (rings, blocks, bounds) = groups[host], _rings(hosts)

    def parts(ring: int) -> tuple[int, int]:
        return bounds[ring * len(groups)], bounds[(ring + 1) * len(groups)]

    def own(index: int) -> int:
        return bounds[index % rings * len(groups) + host] + index // rings

    def exchange(kind: Kind, peer: int, ring: int, receiver: int) -> list[Op]:
        """All blocks of a ring, except the receiver's own if the ring has it already."""
        if receiver % rings != ring:
            return [Op(kind, peer, *parts(ring))]
        return _all_but(kind, peer, own(receiver), own(receiver) + 1, parts(ring))

    first: list[Op] = []
    inside: list[Op] = []
    across: tuple[Phase, ...] = (Phase((), repeat=len(groups) - 1),) if len(groups) > 1 else ()
    if index < rings:
        first = [Op(Kind.COPY, local[i], own(i), own(i) + 1) for i in range(index + rings, len(local), rings)]
        chunks = bounds[index * len(groups) : (index + 1) * len(groups) + 1]
        left, right = groups[host - 1][index], groups[(host + 1) % len(groups)][index]
        across = _pass_on(left, right, host, chunks)
        for other, peer in enumerate(local):
            if other != index:
                inside += exchange(Kind.SEND, peer, index, other)
    else:
        first = [Op(Kind.SEND, local[index % rings], own(index), own(index) + 1)]
    for ring, peer in enumerate(local[:rings]):
        if ring != index:
            inside += exchange(Kind.COPY, peer, ring, index)
    before = (Phase(tuple(first)),) if rings * len(groups) < len(hosts) else ()
    return blocks, own(index), (*before, *across, Phase(tuple(inside)))


@lru_cache(maxsize=16)
def _rings(hosts: Hosts) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """The number of rings; ranks by part, ring by ring, host by host; the first part of each ring's hosts."""
    groups = by_host(hosts)
    rings = min(len(ranks) for ranks in groups)
    chunks = [ranks[ring::rings] for ring in range(rings) for ranks in groups]
    bounds = (0, *accumulate(len(chunk) for chunk in chunks))
    return rings, tuple(rank for chunk in chunks for rank in chunk), bounds


def _master_worker(rank: int, hosts: Hosts) -> Found:
    """All send their block to rank 0, which sends back the others: (P-1)^2 N/P bytes out of one rank.

    A baseline. Source: see `algorithms.master_worker`.
    """
    world_size = len(hosts)
    if rank != 0:
        hand_in = Phase((Op(Kind.SEND, 0, rank, rank + 1),))
        take = Phase(tuple(_all_but(Kind.COPY, 0, rank, rank + 1, (0, world_size))))
        return _in_order(world_size), rank, (hand_in, take)
    collect = tuple(Op(Kind.COPY, worker, worker, worker + 1) for worker in range(1, world_size))
    hand_out = [
        op
        for worker in range(1, world_size)
        for op in _all_but(Kind.SEND, worker, worker, worker + 1, (0, world_size))
    ]
    return _in_order(world_size), 0, (Phase(collect), Phase(tuple(hand_out)))


@lru_cache(maxsize=16)
def _in_order(world_size: int) -> tuple[int, ...]:
    return tuple(range(world_size))


ALL_GATHERS: dict[str, Callable[[int, Hosts], Found]] = {
    "ring": _ring,
    "tree": _tree,
    "halving_doubling": _halving_doubling,
    "hierarchical": _hierarchical,
    "master_worker": _master_worker,
}
