"""Which ranks hold the parameters, and which compute gradients."""

from trainer.errors import UserError


def roles(servers: str, world_size: int) -> tuple[list[int], list[int]]:
    """The ranks of servers and of workers: the first `servers` and all others, or with "all" all in both.

    Raises:
        UserError: too few ranks for the number of servers.
    """
    ranks = list(range(world_size))
    if servers == "all":
        if world_size == 1:
            raise UserError(
                "strategy.servers=all makes every rank a server and a worker, but there is one rank; start "
                "several (torchrun --nproc_per_node=2), or use strategy=single"
            )
        return ranks, ranks
    count = int(servers)
    if count >= world_size:
        raise UserError(
            f"strategy.servers={count} leaves no worker among {world_size} ranks; start "
            f"{count + 1} or more, use strategy.servers={max(1, world_size - 1)} or less, or servers=all"
            if world_size > 1
            else f"strategy.servers={count} needs {count} ranks beside the workers, but there is one rank; "
            f"start {count + 1} or more (torchrun --nproc_per_node={count + 1}), or use strategy=single"
        )
    return ranks[:count], ranks[count:]
