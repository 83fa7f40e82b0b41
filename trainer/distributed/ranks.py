"""The rank, host and device of this process."""

from dataclasses import dataclass, field

import torch

from trainer.failures.heartbeat import Heartbeat


@dataclass(frozen=True)
class Ranks:
    """The rank, host and device of this process, and the hosts of all ranks."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    hosts: tuple[int, ...]  # index of the host of every rank
    device: torch.device
    backend: str
    ranks_per_gpu: int = 1
    heartbeat: Heartbeat = field(default_factory=Heartbeat, repr=False)  # current activity of this process

    @property
    def num_hosts(self) -> int:
        return len(set(self.hosts))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def describe(self, rank: int) -> str:
        return f"rank {rank} (host {self.hosts[rank]})"
