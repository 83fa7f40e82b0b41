"""All-reduce algorithms as data (see schedule.py), for P ranks and buckets of N bytes.

To add an algorithm, write a function here, and add its name to ALGORITHMS below, to COMMS in
trainer/config/schema.py, and as a file conf/comm/NAME.yaml with its settings. DDP, `benchmarks.allreduce` and
`planner.comm` then offer it, and the tests verify it. `planner.comm --formulas` shows it if CLASSIC in
planner/formulas.py has its textbook formula.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

from trainer.comm.algorithms.rank_order import Hosts, by_host, line, positions_in_hosts
from trainer.comm.algorithms.rank_order import tree as tree_of
from trainer.comm.algorithms.schedule import Kind, Op, Phase, Schedule, in_phases

Algorithm = Callable[[int, Sequence[int]], Schedule]  # (rank, host of every rank) -> schedule of the rank


def _ring(ring: Sequence[int], position: int, parts: int, low: int = 0) -> Schedule:
    """Return a reduce-scatter and an all-gather around `ring`, for the parts from `low` on."""
    size = len(ring)
    left, right = ring[position - 1], ring[(position + 1) % size]

    def op(kind: Kind, peer: int, index: int) -> Op:
        begin = low + index % size
        return Op(kind, peer, begin, begin + 1)

    owned = (low + (position + 1) % size, low + (position + 1) % size + 1)
    if size == 1:
        return Schedule(parts, (), owned, ())
    span, repeat = (low, low + size), size - 1
    reduce = Phase((op(Kind.SEND, right, position), op(Kind.ADD, left, position - 1)), repeat, span)
    gather = Phase((op(Kind.SEND, right, position + 1), op(Kind.COPY, left, position)), repeat, span)
    return Schedule(parts, (reduce,), owned, (gather,))


def ring(rank: int, hosts: Sequence[int]) -> Schedule:
    """Ring: each rank sends 1/P of the bucket to its right neighbour, P-1 times to add and P-1 times to copy.

    Each rank sends 2N(P-1)/P bytes, the minimum, in 2(P-1) rounds. Source: Patarasuk & Yuan, "Bandwidth
    optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
    """
    order, position = line(Hosts.of(hosts))
    return _ring(order, position[rank], parts=len(hosts))


@lru_cache(maxsize=16)
def _deepest(hosts: Hosts) -> int:
    return max(position.depth for position in tree_of(hosts))


def tree(rank: int, hosts: Sequence[int]) -> Schedule:
    """Tree: sums move up a binary tree to its root, and the total moves down, in 2 log2 P rounds of N bytes.

    The first ranks of the hosts form a binary tree, and so do the ranks of each host, so each host's link
    carries N bytes up and N down per neighbour. Source: Thakur, Rabenseifner & Gropp, "Optimization of
    collective communication operations in MPICH", IJHPCA 2005, section 4; NCCL's trees have the same layout.
    """
    tree = tree_of(Hosts.of(hosts))
    parent, children, depth = tree[rank].parent, tree[rank].children, tree[rank].depth
    deepest = _deepest(Hosts.of(hosts))
    up: list[list[Op]] = [[] for _ in range(deepest)]
    down: list[list[Op]] = [[] for _ in range(deepest)]
    for child in children:
        up[deepest - depth - 1].append(Op(Kind.ADD, child, 0, 1))
        down[depth].append(Op(Kind.SEND, child, 0, 1))
    if parent is not None:
        up[deepest - depth].append(Op(Kind.SEND, parent, 0, 1))
        down[depth - 1].append(Op(Kind.COPY, parent, 0, 1))
    owned = (0, 1) if parent is None else (0, 0)
    return Schedule(1, in_phases(up), owned, in_phases(down))


def halving_doubling(rank: int, hosts: Sequence[int]) -> Schedule:
    """Halving-doubling: pairs of ranks add halves, quarters, ..., then copy them back, in 2 log2 P rounds.

    Each rank sends 2N(P-1)/P bytes if P is a power of two. Otherwise, each of the P - 2^k excess ranks first
    sends N bytes to a neighbour, and receives the result at the end. The nearest partners exchange the
    largest chunks, so little data crosses hosts. Source: Rabenseifner, "Optimization of collective reduction
    operations", ICCS 2004; Thakur, Rabenseifner & Gropp 2005, section 4.5.
    """
    order, positions = line(Hosts.of(hosts))
    position, world_size = positions[rank], len(hosts)
    levels = world_size.bit_length() - 1
    core, excess = 1 << levels, world_size - (1 << levels)

    # The first 2 * excess positions are pairs: the second rank of a pair only sends its data to the first.
    def core_rank(index: int) -> int:
        return order[2 * index if index < excess else index + excess]

    folded = position < 2 * excess
    partner = order[position ^ 1] if folded else -1
    if folded and position % 2:
        idle = (Phase((), repeat=levels),) if levels else ()
        fold_in, fold_out = Op(Kind.SEND, partner, 0, core), Op(Kind.COPY, partner, 0, core)
        return Schedule(core, (Phase((fold_in,)), *idle), (0, 0), (*idle, Phase((fold_out,))))

    index = position // 2 if folded else position - excess
    low, high = 0, core
    halving: list[Phase] = []
    doubling: list[Phase] = []
    for level in range(levels):
        peer, middle = core_rank(index ^ (1 << level)), (low + high) // 2
        lower, upper = (low, middle), (middle, high)
        keep, give = (upper, lower) if index >> level & 1 else (lower, upper)
        halving.append(Phase((Op(Kind.SEND, peer, *give), Op(Kind.ADD, peer, *keep))))
        doubling.insert(0, Phase((Op(Kind.SEND, peer, *keep), Op(Kind.COPY, peer, *give))))
        low, high = keep
    if excess:
        halving.insert(0, Phase((Op(Kind.ADD, partner, 0, core),) if folded else ()))
        doubling.append(Phase((Op(Kind.SEND, partner, 0, core),) if folded else ()))
    return Schedule(core, tuple(halving), (low, high), tuple(doubling))


@lru_cache(maxsize=16)
def _shard_rings(hosts: Hosts) -> tuple[tuple[int, ...], ...]:
    """Return the owner of each shard on each host, with one shard per rank of the smallest host."""
    return tuple(zip(*by_host(hosts), strict=False))


def hierarchical(rank: int, hosts: Sequence[int]) -> Schedule:
    """Hierarchical: reduce-scatter in each host, a ring across hosts for each shard, all-gather in each host.

    Each host's link carries 2N(H-1)/H bytes for H hosts and any number of ranks; with a flat ring, it carries
    2N(P-1)/P. The smallest host has one shard per rank; additional ranks of a larger host send to the owners
    of the shards, and receive from them. Source: Jia et al., "Highly Scalable Deep Learning Training System
    with Mixed-Precision", 2018, section 4.2 (with one shard).
    """
    members = by_host(Hosts.of(hosts))
    host, index = positions_in_hosts(Hosts.of(hosts))[rank]
    local, num_hosts = members[host], len(members)
    rings = _shard_rings(Hosts.of(hosts))
    num_shards = len(rings)
    owners = local[:num_shards]

    def shard(kind: Kind, peer: int, number: int) -> Op:
        return Op(kind, peer, number * num_hosts, (number + 1) * num_hosts)

    scatter = [shard(Kind.SEND, owner, j) for j, owner in enumerate(owners) if owner != rank]
    gather = [shard(Kind.COPY, owner, j) for j, owner in enumerate(owners) if owner != rank]
    parts = num_shards * num_hosts
    if index < num_shards:
        others = [peer for peer in local if peer != rank]
        scatter += [shard(Kind.ADD, peer, index) for peer in others]
        gather = [shard(Kind.SEND, peer, index) for peer in others] + gather
        across = _ring(rings[index], host, parts, low=index * num_hosts)
    else:
        idle = (Phase((), repeat=num_hosts - 1),) if num_hosts > 1 else ()
        across = Schedule(parts, idle, (0, 0), idle)
    first, last = Phase(tuple(scatter)), Phase(tuple(gather))
    return Schedule(parts, (first, *across.reduce), across.owned, (*across.gather, last))


def master_worker(rank: int, hosts: Sequence[int]) -> Schedule:
    """Master-worker, a baseline: rank 0 receives (P-1)N bytes from the other ranks, and sends the sum back.

    Source: Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014, with one
    synchronous server.
    """
    if rank != 0:
        return Schedule(1, (Phase((Op(Kind.SEND, 0, 0, 1),)),), (0, 0), (Phase((Op(Kind.COPY, 0, 0, 1),)),))
    workers = range(1, len(hosts))
    collect = tuple(Op(Kind.ADD, worker, 0, 1) for worker in workers)
    hand_out = tuple(Op(Kind.SEND, worker, 0, 1) for worker in workers)
    return Schedule(1, (Phase(collect),), (0, 1), (Phase(hand_out),))


ALGORITHMS: dict[str, Algorithm] = {
    "ring": ring,
    "tree": tree,
    "halving_doubling": halving_doubling,
    "hierarchical": hierarchical,
    "master_worker": master_worker,
}


def build(algorithm: str, rank: int, hosts: Sequence[int]) -> Schedule:
    """Return the schedule of `rank` for the named algorithm."""
    return ALGORITHMS[algorithm](rank, hosts)
