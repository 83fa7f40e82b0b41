"""The place of this host among several, where a job starts launch=local on each of them.

Told in torchrun's own variables, PET_*, which Kubeflow's torch runtime and launch=kubernetes set in each pod.
"""

import os
import re
from dataclasses import dataclass

from trainer.errors import UserError

_NPROC = "PET_NPROC_PER_NODE"


@dataclass(frozen=True)
class HostPlace:
    """One host of a run; the defaults are those of the only one."""

    rank: int = 0
    count: int = 1
    address: str | None = None  # of the host of rank 0, if there are several
    port: int | None = None
    processes: int | None = None  # on each host; None: not told, or left to the number of GPUs


def host_place() -> HostPlace:
    """Return the place of this host, from the environment.

    Raises:
        UserError: a variable is missing, or not the number that it must be.
    """
    told = os.environ.get(_NPROC, "auto")
    processes = None if told in ("auto", "cpu", "gpu") else _number(_NPROC, at_least=1)
    if os.environ.get("PET_NNODES", "1") == "1":
        return HostPlace(processes=processes)
    count, rank, port = _number("PET_NNODES", 1), _number("PET_NODE_RANK"), _number("PET_MASTER_PORT", 1)
    if rank >= count:
        raise UserError(f"PET_NODE_RANK={rank}, but PET_NNODES={count}: hosts count from 0 to {count - 1}")
    return HostPlace(rank, count, _told("PET_MASTER_ADDR"), port, processes)


def _number(name: str, at_least: int = 0) -> int:
    told = _told(name)
    if not re.fullmatch(r"\d+", told) or int(told) < at_least:
        raise UserError(f"{name}={told}, but must be a number, at least {at_least}")
    return int(told)


def _told(name: str) -> str:
    if name not in os.environ:
        raise UserError(
            f"PET_NNODES={os.environ.get('PET_NNODES')}, but {name} is not set; set it on each host"
        )
    return os.environ[name]
