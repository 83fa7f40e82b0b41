"""The mesh of fsdp: which ranks share one copy of the parameters, and which hold the same shard."""

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.distributed.process_group import Dist
from trainer.errors import UserError


def sharding_mesh(shard_group: str, dist: Dist) -> DeviceMesh:
    """(shard) or (replicate, shard), for strategy.shard_group.

    Raises:
        UserError: it does not divide the ranks; on every rank.
    """
    ranks = range(dist.world_size)
    if shard_group == "host":
        rows = ranks_by_host(dist.hosts)
    else:
        size = dist.world_size if shard_group == "world" else int(shard_group)
        if dist.world_size % size:
            raise UserError(
                f"strategy.shard_group={shard_group} makes groups of {size} ranks, which do not divide the "
                f"{dist.world_size} ranks of this run; use a divisor of {dist.world_size}, or world"
            )
        rows = [list(ranks[begin : begin + size]) for begin in ranks[::size]]
    if len(rows) == 1:
        return init_device_mesh(dist.device.type, (dist.world_size,), mesh_dim_names=("shard",))
    return DeviceMesh(dist.device.type, rows, mesh_dim_names=("replicate", "shard"))


def ranks_by_host(hosts: Sequence[int]) -> list[list[int]]:
    """The ranks of each host, in any numbering.

    Raises:
        UserError: hosts have different numbers of ranks; on every rank.
    """
    rows = [[rank for rank, at in enumerate(hosts) if at == host] for host in dict.fromkeys(hosts)]
    if len({len(row) for row in rows}) > 1:
        counts = ", ".join(str(len(row)) for row in rows)
        raise UserError(
            f"strategy.shard_group=host needs as many ranks on each host, but these have {counts}; use "
            "strategy.shard_group=world, or start as many on each"
        )
    return rows
