"""Going on without a restart: the ranks that are left end their groups, and meet again in the same processes.

A rank that waits for a dead one gets an error of gloo. One that waits for a rank that lives, and got that
error, would wait for ever. So each cuts the connections of its own groups, and all waits end. Then the run
begins once more, as after a restart of as many ranks, from the step that a rank of them has saved. The
lowest rank that is left opens the store, at a port that each rank has held ready since the start: the former
store may have died with rank 0.
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
from trainer.launch.rank_info import LISTENING, RankInfo

_of_groups = set[int]()  # the inodes of sockets of this process


class Shrunk(Exception):  # noqa: N818, the run goes on
    """The run goes on in this process, which has another place in it, from its newest checkpoint."""

    def __init__(self, rank_info: RankInfo, run_dir: Path) -> None:
        super().__init__(f"goes on as rank {rank_info.rank} of {rank_info.world_size}")
        self.rank_info, self.run_dir = rank_info, run_dir


def refuse(here: RankInfo, hosts: Sequence[int]) -> None:
    """Raise UserError if the launcher ends the other ranks when one dies."""
    if here.launcher == "mpirun" or (here.under_torchrun and len(set(hosts)) == 1):
        raise UserError(
            f"distributed.shrink=true, but {here.launcher} ends all its ranks when one of them dies; start "
            "them by launch=local, by srun --kill-on-bad-exit=0 --wait=0, or by one torchrun on each of "
            "several hosts, or set it to false"
        )


def why_not(device: torch.device, backend: str, addresses: Sequence[str | None]) -> str | None:
    """Why ranks cannot go on without others here, in a phrase."""
    if device.type != "cpu" or backend != "gloo":
        return f"only gloo on CPUs lets go of a dead rank, and this is {backend} on {device.type}"
    if len({is_loopback(address) for address in addresses}) > 1:
        return "a host knows itself by a loopback address only, at which others would not meet it"
    return None


@contextlib.contextmanager
def connecting() -> Iterator[None]:
    """Around the creation of groups: `cut` knows the connections that are made within."""
    before = _sockets().keys()
    yield
    _of_groups.update(_sockets().keys() - before)


def cut() -> None:
    """End all connections of this process's groups, and with them the waits of any thread for a rank."""
    for inode, descriptor in _sockets().items():
        with contextlib.suppress(OSError):  # it is closed meanwhile, or was never connected
            if inode in _of_groups:
                with socket.socket(fileno=os.dup(descriptor)) as end:
                    if not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # gloo would abort
                        end.shutdown(socket.SHUT_RDWR)
    _of_groups.clear()


def _sockets() -> dict[int, int]:
    """The descriptors of this process's sockets, by inode."""
    found = {}
    for path in Path("/proc/self/fd" if sys.platform == "linux" else "/dev/fd").iterdir():
        with contextlib.suppress(OSError):  # it is closed meanwhile
            if path.is_socket():
                found[path.stat().st_ino] = int(path.name)
    return found


def listen_for_survivors(address: str | None) -> socket.socket:
    """A socket that listens where the ranks that are left meet, should this one be the lowest of them."""
    address = address or "127.0.0.1"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def rank_info_among(
    survivors: Sequence[int], here: RankInfo, members: Sequence[RankIdentity], own: socket.socket
) -> RankInfo:
    """Return the rank info of this process among the survivors.

    The lowest of them serves the store from `own`, its listening socket.
    """
    first, rank = members[survivors[0]], survivors.index(here.rank)
    beside = [other for other in survivors if members[other].host == members[here.rank].host]
    if rank == 0:
        os.environ[LISTENING] = str(own.detach())
    address = first.address or "127.0.0.1"
    shown = f"[{address}]" if ":" in address else address
    return replace(
        here,
        rank=rank,
        world_size=len(survivors),
        local_rank=beside.index(here.rank),
        local_world_size=len(beside),
        init_method=f"tcp://{shown}:{first.rendezvous_port}",
    )
