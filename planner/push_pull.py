"""A parameter server's push and pull as schedules, counted and predicted beside the all-reduces.

One part for each server. Pulling waits for the update, and so for the last push: there are two schedules,
one after the other. Source: Li et al., "Scaling distributed machine learning with the parameter server",
OSDI 2014.
"""

from collections.abc import Sequence

from trainer.comm.algorithms.schedule import Kind, Op, Phase, Schedule


def exchange(servers: Sequence[int], workers: Sequence[int]) -> tuple[list[Schedule], list[Schedule]]:
    """The schedules of all ranks, (push, pull). A rank may be both, and sends itself nothing."""
    push, pull = [], []
    for rank in sorted({*servers, *workers}):
        up: list[Op] = []
        down: list[Op] = []
        if rank in workers:
            for part in _from(servers, rank):
                if servers[part] != rank:
                    up.append(Op(Kind.SEND, servers[part], part, part + 1))
                    down.append(Op(Kind.COPY, servers[part], part, part + 1))
        owned = (0, 0)
        if rank in servers:
            part = servers.index(rank)
            owned = (part, part + 1)
            others = [workers[number] for number in _from(workers, rank) if workers[number] != rank]
            up += [Op(Kind.ADD, worker, *owned) for worker in others]
            down += [Op(Kind.SEND, worker, *owned) for worker in others]
        push.append(Schedule(len(servers), (Phase(tuple(up)),), owned, ()))
        pull.append(Schedule(len(servers), (), owned, (Phase(tuple(down)),)))
    return push, pull


def _from(members: Sequence[int], rank: int) -> list[int]:
    """Indices into `members`, starting at another one for each rank, to spread the load."""
    return [(rank + number) % len(members) for number in range(len(members))]
