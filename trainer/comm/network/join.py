"""Set-up for the commands of this package, which use torch without the trainer and its settings."""

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.comm.network.checks import GroupRank
from trainer.errors import first_line


class JoinError(RuntimeError):
    """The ranks do not find each other; the message names those missing."""


@dataclass(frozen=True)
class JoinedRanks:
    """This process among all ranks, before any process group exists."""

    rank: int
    world_size: int
    hosts: tuple[int, ...]  # index of the host of every rank
    host_names: tuple[str, ...]  # by rank
    store: dist.Store  # for the process group
    control: dist.Store  # for verdicts: calls on one connection wait for the one before, which may hang
    master: str  # address:port of the store; empty without torchrun

    @property
    def ranks_by_host(self) -> list[list[int]]:
        return [[r for r, h in enumerate(self.hosts) if h == host] for host in sorted(set(self.hosts))]

    def name(self, rank: int) -> str:
        return f"rank {rank} (host {self.hosts[rank]}, {self.host_names[rank]})"


@contextmanager
def deadline(limit_s: float, expired: Callable[[], None]) -> Iterator[None]:
    """Call `expired` in another thread if the body takes longer: it may be stuck in C++ forever."""
    clock = threading.Timer(limit_s, expired)
    clock.daemon = True
    clock.start()
    try:
        yield
    finally:
        clock.cancel()


def find_ranks(timeout_s: float) -> JoinedRanks:
    """Find the other ranks by torchrun's environment; without torchrun this process is the only one.

    Raises:
        JoinError: the store does not answer, or the named ranks did not come within `timeout_s`.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    timeout = timedelta(seconds=timeout_s)
    if "RANK" not in os.environ:
        alone = dist.HashStore()
        return JoinedRanks(0, 1, (0,), (socket.gethostname(),), alone, alone, "")
    master = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", rank, world_size, timeout=timeout)))
    except (ValueError, RuntimeError) as error:
        raise JoinError(
            f"rank {rank} on {socket.gethostname()} cannot reach the store of rank 0 at {master}: "
            f"{first_line(error)}; check that all hosts can reach this address, and that the port is open"
        ) from error
    store = dist.PrefixStore("comm", store)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    host = int(os.environ.get("GROUP_RANK", rank // local_world_size))
    store.set(f"host/{rank}", json.dumps([host, socket.gethostname()]))
    keys = [f"host/{other}" for other in range(world_size)]
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise JoinError(
            f"waited {timeout_s:g} s for all {world_size} ranks to come to {master}; missing: {missing} "
            f"({local_world_size} ranks on each host)"
        ) from error
    found = [json.loads(store.get(key)) for key in keys]
    hosts, names = (tuple(column) for column in zip(*found, strict=True))
    return JoinedRanks(rank, world_size, hosts, names, store, store.clone(), master)


def write(file: Path | None, text: str) -> bool:
    """Write the results to `file` if given; print the error and return False if that fails."""
    try:
        if file is not None:
            file.write_text(text)
    except OSError as error:
        print(f"--json {file}: {error.strerror}", file=sys.stderr, flush=True)
        return False
    return True


def connect(joined: JoinedRanks, backend: str | None, timeout_s: float) -> GroupRank:
    """Create the default process group: nccl with a GPU, else gloo, unless `backend` says otherwise.

    A collective without an answer fails after `timeout_s` on gloo; nccl would end the process, so its timeout
    is longer than any wait here.

    Raises:
        ValueError: nccl without a GPU.
        RuntimeError: the backend's error when its peers do not answer.
    """
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if backend == "nccl":
        if not torch.cuda.is_available():
            raise ValueError("--backend nccl needs a GPU, but torch sees none here; use --backend gloo")
        # More ranks than GPUs share them; NCCL decides whether that works.
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        timeout_s = 3 * timeout_s + 60
    dist.init_process_group(
        backend,
        store=joined.store,
        rank=joined.rank,
        world_size=joined.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if backend == "nccl" else None,
    )
    return GroupRank(joined.rank, joined.world_size, device)
