"""The push and pull of a parameter server as schedules, which are predicted like all-reduces.

The parameters are divided into one part per server. A pull starts after the update, and so after the last
push. Therefore, push and pull are two consecutive schedules.

Source: M. Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014.
"""

from collections.abc import Sequence

from trainer.comm.algorithms.schedule import Kind, Op, Phase, Schedule


def exchange(servers: Sequence[int], workers: Sequence[int]) -> tuple[list[Schedule], list[Schedule]]:
    """Return the schedules (push, pull) of all ranks. A rank may be both server and worker.

    Servers also pull from each other, because each rank evaluates the model.
    """
    push, pull, everyone = [], [], sorted({*servers, *workers})
    for rank in everyone:
        from_others = [part for part in _from(servers, rank) if servers[part] != rank]
        up = [Op(Kind.SEND, servers[part], part, part + 1) for part in from_others if rank in workers]
        down = [Op(Kind.COPY, servers[part], part, part + 1) for part in from_others]
        owned = (0, 0)
        if rank in servers:
            part = servers.index(rank)
            owned = (part, part + 1)
            up += [Op(Kind.ADD, worker, *owned) for worker in _others(workers, rank)]
            down += [Op(Kind.SEND, other, *owned) for other in _others(everyone, rank)]
        push.append(Schedule(len(servers), (Phase(tuple(up)),), owned, ()))
        pull.append(Schedule(len(servers), (), owned, (Phase(tuple(down)),)))
    return push, pull


def _others(members: Sequence[int], rank: int) -> list[int]:
    return [members[number] for number in _from(members, rank) if members[number] != rank]


def _from(members: Sequence[int], rank: int) -> list[int]:
    """Return the indices of `members`, starting at a different index for each rank to spread the load."""
    return [(rank + number) % len(members) for number in range(len(members))]
