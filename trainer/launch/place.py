"""Where this process stands among those of its run: torchrun's environment."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where torchrun put this process; a single process without torchrun is rank 0 of 1."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    host: int
    under_torchrun: bool


def place() -> Place:
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return Place(
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        world_size=world_size,
        local_world_size=local_world_size,
        host=int(os.environ.get("GROUP_RANK", rank // local_world_size)),
        under_torchrun="RANK" in os.environ,
    )
