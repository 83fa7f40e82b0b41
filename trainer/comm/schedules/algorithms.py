"""All-reduce algorithms as data: what one rank sends, receives, adds and copies, round by round.

A schedule knows no tensor and no network. The executor runs it, the simulator proves it, the traffic
counter and the cost model read it. Three rules make a family of schedules (one per rank) valid:

- a message sent in round k is received in round k, so every rank's schedule has the same number of rounds;
- a send reads the chunk as the rounds before left it;
- each part is summed to the end on one rank, in one fixed order, and copied from there, so that all ranks
  end with the same bits. The rank that does so owns the part.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache


class Kind(Enum):
    SEND = "send"  # the chunk to the peer
    ADD = "add"  # what the peer sends into the chunk
    COPY = "copy"  # what the peer sends over the chunk


@dataclass(frozen=True, slots=True)
class Op:
    """One message with a peer: the chunk is the parts [begin, end) of the bucket."""

    kind: Kind
    peer: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Phase:
    """`repeat` rounds of the same ops, each round moving every chunk back by its own width within `ring`.

    The repetition keeps the schedule of thousands of ranks small: a ring is two phases at any world size.
    """

    ops: tuple[Op, ...]
    repeat: int = 1
    ring: tuple[int, int] = (0, 1)  # the parts [low, high) within which chunks move

    def round(self, index: int) -> tuple[Op, ...]:
        """The ops of repetition `index`."""
        if index == 0:
            return self.ops
        low, high = self.ring
        moved = []
        for op in self.ops:
            width = op.end - op.begin
            begin = low + (op.begin - low - index * width) % (high - low)
            moved.append(Op(op.kind, op.peer, begin, begin + width))
        return tuple(moved)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One rank's part in an all-reduce of a bucket that is cut into `parts` nearly equal parts."""

    parts: int
    reduce: tuple[Phase, ...]
    owned: tuple[int, int]  # after `reduce` this rank alone holds the sum of the parts [begin, end)
    gather: tuple[Phase, ...]

    @property
    def num_reduce_rounds(self) -> int:
        return sum(phase.repeat for phase in self.reduce)

    @property
    def num_rounds(self) -> int:
        return self.num_reduce_rounds + sum(phase.repeat for phase in self.gather)

    def rounds(self) -> Iterator[tuple[Op, ...]]:
        """The rounds in order, made one at a time."""
        for phase in (*self.reduce, *self.gather):
            for index in range(phase.repeat):
                yield phase.round(index)

    def peers(self, *kinds: Kind) -> list[int]:
        """The ranks with which this one has moves of the given kinds, in order."""
        return sorted({op.peer for op in self._ops() if op.kind in kinds})

    @property
    def widest(self) -> int:
        """Parts in the longest message."""
        return max((op.end - op.begin for op in self._ops()), default=0)

    def _ops(self) -> Iterator[Op]:
        return (op for phase in (*self.reduce, *self.gather) for op in phase.ops)

    def boundary(self, part: int, numel: int) -> int:
        """The first element of `part` in a bucket of `numel` elements; part `parts` begins at its end."""
        return part * numel // self.parts


Algorithm = Callable[[int, Sequence[int]], Schedule]  # (rank, host of every rank) -> its part


@lru_cache(maxsize=16)
def _members(hosts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host, hosts in the order of their first rank."""
    by_host: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    return tuple(tuple(ranks) for ranks in by_host.values())


@lru_cache(maxsize=16)
def _places(hosts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Each rank's (host, index within the host), both counted as in `_members`."""
    places = {r: (h, i) for h, ranks in enumerate(_members(hosts)) for i, r in enumerate(ranks)}
    return tuple(places[rank] for rank in range(len(hosts)))


@lru_cache(maxsize=16)
def _line(hosts: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ranks host by host, so that neighbours share a host where they can; and each rank's place in it."""
    order = tuple(rank for ranks in _members(hosts) for rank in ranks)
    return order, tuple(sorted(range(len(order)), key=order.__getitem__))


def _ring(ring: Sequence[int], place: int, parts: int, low: int = 0) -> Schedule:
    """Reduce-scatter, then all-gather, of the len(ring) parts from `low`, each rank passing to the right."""
    size = len(ring)
    left, right = ring[place - 1], ring[(place + 1) % size]

    def op(kind: Kind, peer: int, index: int) -> Op:
        begin = low + index % size
        return Op(kind, peer, begin, begin + 1)

    owned = (low + (place + 1) % size, low + (place + 1) % size + 1)
    if size == 1:
        return Schedule(parts, (), owned, ())
    span, repeat = (low, low + size), size - 1
    reduce = Phase((op(Kind.SEND, right, place), op(Kind.ADD, left, place - 1)), repeat, span)
    gather = Phase((op(Kind.SEND, right, place + 1), op(Kind.COPY, left, place)), repeat, span)
    return Schedule(parts, (reduce,), owned, (gather,))


def ring(rank: int, hosts: Sequence[int]) -> Schedule:
    """Each rank passes 1/P of the bucket to its right neighbour, P-1 times to add and P-1 times to copy.

    Sends 2N(P-1)/P bytes per rank, the least there is, in 2(P-1) rounds. Source: Patarasuk & Yuan,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
    """
    order, place = _line(tuple(hosts))
    return _ring(order, place[rank], parts=len(hosts))


def _heap_depth(index: int) -> int:
    return (index + 1).bit_length() - 1


@lru_cache(maxsize=16)
def _tree_depth(hosts: tuple[int, ...]) -> int:
    return max(_heap_depth(h) + _heap_depth(i) for h, i in _places(hosts))


def tree(rank: int, hosts: Sequence[int]) -> Schedule:
    """Sums climb a binary tree to its root, the total comes down again: 2 log2 P rounds of N bytes.

    A binary tree of the hosts' first ranks, and one inside each host, so that each host's link carries N
    bytes up and N down per neighbour. Source: Thakur, Rabenseifner & Gropp, "Optimization of collective
    communication operations in MPICH", IJHPCA 2005, section 4; NCCL's trees are laid out alike.
    """
    members = _members(tuple(hosts))
    host, index = _places(tuple(hosts))[rank]
    local, leaders = members[host], [ranks[0] for ranks in members]

    children = [local[i] for i in (2 * index + 1, 2 * index + 2) if i < len(local)]
    parent = local[(index - 1) // 2] if index > 0 else None
    if index == 0:
        children += [leaders[i] for i in (2 * host + 1, 2 * host + 2) if i < len(leaders)]
        parent = leaders[(host - 1) // 2] if host > 0 else None

    depth = _heap_depth(host) + _heap_depth(index)
    deepest = _tree_depth(tuple(hosts))
    up: list[list[Op]] = [[] for _ in range(deepest)]
    down: list[list[Op]] = [[] for _ in range(deepest)]
    for child in children:
        up[deepest - depth - 1].append(Op(Kind.ADD, child, 0, 1))
        down[depth].append(Op(Kind.SEND, child, 0, 1))
    if parent is not None:
        up[deepest - depth].append(Op(Kind.SEND, parent, 0, 1))
        down[depth - 1].append(Op(Kind.COPY, parent, 0, 1))
    owned = (0, 1) if parent is None else (0, 0)
    reduce, gather = ([Phase(tuple(ops)) for ops in rounds] for rounds in (up, down))
    return Schedule(1, tuple(reduce), owned, tuple(gather))


def halving_doubling(rank: int, hosts: Sequence[int]) -> Schedule:
    """Pairs exchange halves, quarters, eighths ... to add, then the same way back to copy: 2 log2 P rounds.

    Sends 2N(P-1)/P bytes per rank at a power of two. Other world sizes fold their P - 2^k excess ranks into
    a neighbour first (N bytes) and hand them the result last (N bytes). Nearest partners exchange the largest
    chunks, so that what crosses hosts is small. Source: Rabenseifner, "Optimization of collective reduction
    operations", ICCS 2004; Thakur, Rabenseifner & Gropp 2005, section 4.5.
    """
    order, places = _line(tuple(hosts))
    place, world_size = places[rank], len(hosts)
    levels = world_size.bit_length() - 1
    core, excess = 1 << levels, world_size - (1 << levels)

    # The first 2 * excess places are pairs, of which the first takes part and the second only hands over.
    def core_rank(index: int) -> int:
        return order[2 * index if index < excess else index + excess]

    folded = place < 2 * excess
    partner = order[place ^ 1] if folded else -1
    if folded and place % 2:
        idle = (Phase((), repeat=levels),) if levels else ()
        fold_in, fold_out = Op(Kind.SEND, partner, 0, core), Op(Kind.COPY, partner, 0, core)
        return Schedule(core, (Phase((fold_in,)), *idle), (0, 0), (*idle, Phase((fold_out,))))

    index = place // 2 if folded else place - excess
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


def hierarchical(rank: int, hosts: Sequence[int]) -> Schedule:
    """Reduce-scatter inside each host, a ring across hosts for every shard, all-gather inside each host.

    Each host's link carries 2N(H-1)/H bytes for H hosts, however many ranks share it; a flat ring carries
    2N(P-1)/P. There are as many shards as the smallest host has ranks; further ranks of a larger host give
    to the owners of the shards and take from them. Source: Jia et al., "Highly Scalable Deep Learning
    Training System with Mixed-Precision", 2018, section 4.2 (there with one shard); NCCL's in-host stage.
    """
    members = _members(tuple(hosts))
    host, index = _places(tuple(hosts))[rank]
    local, num_hosts = members[host], len(members)
    num_shards = min(len(ranks) for ranks in members)
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
        across = _ring([ranks[index] for ranks in members], host, parts, low=index * num_hosts)
    else:
        idle = (Phase((), repeat=num_hosts - 1),) if num_hosts > 1 else ()
        across = Schedule(parts, idle, (0, 0), idle)
    first, last = Phase(tuple(scatter)), Phase(tuple(gather))
    return Schedule(parts, (first, *across.reduce), across.owned, (*across.gather, last))


def master_worker(rank: int, hosts: Sequence[int]) -> Schedule:
    """All send to rank 0, which adds and sends back: (P-1)N bytes into one rank. The baseline to beat.

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
    """The schedule of `rank` under the named algorithm.

    Args:
        hosts: the host index of every rank; ranks of one host need not be neighbours.

    Raises:
        ValueError: no such algorithm, or no such rank.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"no all-reduce algorithm {algorithm!r}; there are {', '.join(ALGORITHMS)}")
    if not 0 <= rank < len(hosts):
        raise ValueError(f"rank {rank} is not among the {len(hosts)} ranks of hosts={list(hosts)}")
    return ALGORITHMS[algorithm](rank, hosts)
