"""Continue without a restart: survivors destroy their groups and rendezvous again in the same processes.

A rank that waits for a dead rank gets an error from gloo. A rank that waits for a survivor with such an error
would wait forever. Therefore, each survivor cuts the connections of its groups, which ends all waits. The run
then starts again, as after a restart with fewer ranks, from the checkpoint that a survivor has saved. The
lowest surviving rank serves a new store, because the previous one may have died with rank 0. For this, each
rank has opened a port at the start.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from trainer.distributed.interfaces import is_loopback
from trainer.errors import UserError
from trainer.failures.neighbour import RankIdentity
from trainer.launch.rank_info import STORE_FD, RankInfo

_group_sockets = set[int]()  # the inodes of sockets of this process


class Shrunk(Exception):  # noqa: N818, not an error: the run continues
    """Raised to continue the run in this process, with a new rank, from the newest checkpoint."""

    def __init__(self, rank_info: RankInfo, run_dir: Path) -> None:
        super().__init__(f"continues as rank {rank_info.rank} of {rank_info.world_size}")
        self.rank_info, self.run_dir = rank_info, run_dir


def check_launcher(here: RankInfo, hosts: Sequence[int]) -> None:
    """Raise UserError if the launcher kills all ranks when one of them dies."""
    if here.launcher == "mpirun" or (here.under_torchrun and len(set(hosts)) == 1):
        raise UserError(
            f"distributed.shrink=true is not supported under {here.launcher}, because it kills all its ranks "
            "when one of them dies; use launch=local, srun --kill-on-bad-exit=0 --wait=0, or torchrun on "
            "each of several hosts, or set distributed.shrink=false"
        )


def unsupported(device: torch.device, backend: str, addresses: Sequence[str | None]) -> str | None:
    """Return why survivors cannot continue after other ranks have failed; None if they can."""
    if device.type != "cpu" or backend != "gloo":
        return f"only gloo on CPUs can drop a dead rank, but this run uses {backend} on {device.type}"
    if len({is_loopback(address) for address in addresses}) > 1:
        return "a host knows only a loopback address of its own, at which other hosts can't reach it"
    return None


@contextlib.contextmanager
def connecting() -> Iterator[None]:
    """Record the connections of groups that are created within the block, so that `cut` can close them."""
    before = _sockets().keys()
    yield
    _group_sockets.update(_sockets().keys() - before)


def cut() -> None:
    """Shut down all connections of this process's groups, which ends all waits for other ranks."""
    for inode, descriptor in _sockets().items():
        with contextlib.suppress(OSError):  # closed in the meantime, or never connected
            if inode in _group_sockets:
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    # gloo would abort if a listening socket were shut down.
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        connection.shutdown(socket.SHUT_RDWR)
    _group_sockets.clear()


def _sockets() -> dict[int, int]:
    descriptors = {}
    for path in Path("/proc/self/fd" if sys.platform == "linux" else "/dev/fd").iterdir():
        with contextlib.suppress(OSError):  # closed in the meantime
            if path.is_socket():
                descriptors[path.stat().st_ino] = int(path.name)
    return descriptors


def listen_for_survivors(address: str | None) -> socket.socket:
    """Open the socket of the TCPStore that this rank serves if it becomes the lowest surviving rank."""
    address = address or "127.0.0.1"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def rank_info_among(
    survivors: Sequence[int], here: RankInfo, members: Sequence[RankIdentity], own: socket.socket
) -> RankInfo:
    """Return the rank info of this process among the survivors."""
    first, rank = members[survivors[0]], survivors.index(here.rank)
    local_ranks = [other for other in survivors if members[other].host == members[here.rank].host]
    if rank == 0:
        os.environ[STORE_FD] = str(own.detach())
    address = first.address or "127.0.0.1"
    shown = f"[{address}]" if ":" in address else address
    return replace(
        here,
        rank=rank,
        world_size=len(survivors),
        local_rank=local_ranks.index(here.rank),
        local_world_size=len(local_ranks),
        init_method=f"tcp://{shown}:{first.rendezvous_port}",
    )
