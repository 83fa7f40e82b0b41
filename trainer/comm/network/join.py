"""Set-up for the commands of this package, which run on torch alone, without the trainer and its settings."""

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
    """The ranks do not find each other; the message names who is missing."""


@dataclass(frozen=True)
class JoinedRanks:
    """This process among all, as known before any process group exists."""

    rank: int
    world_size: int
    hosts: tuple[int, ...]  # index of the host of every rank
    host_names: tuple[str, ...]  # by rank
    store: dist.Store  # for the process group
    control: dist.Store  # for verdicts: on one connection a call waits for the one before, which may hang
    master: str  # address:port of the store; empty without torchrun

    @property
    def ranks_by_host(self) -> list[list[int]]:
        return [[r for r, h in enumerate(self.hosts) if h == host] for host in sorted(set(self.hosts))]

    def name(self, rank: int) -> str:
        return f"rank {rank} (host {self.hosts[rank]}, {self.host_names[rank]})"


@contextmanager
def deadline(limit_s: float, expired: Callable[[], None]) -> Iterator[None]:
    """Call `expired` in a thread of its own if the body takes longer: it may be stuck in C++ for ever."""
    clock = threading.Timer(limit_s, expired)
    clock.daemon = True
    clock.start()
    try:
        yield
    finally:
        clock.cancel()


def meet(timeout_s: float) -> JoinedRanks:
    """Find the other ranks by torchrun's environment; without torchrun this process is all there is.

    Raises:
        JoinError: the store does not answer, or ranks did not come within `timeout_s`; they are named.
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
            f"{first_line(error)}; is that an address all hosts can reach, and the port open?"
        ) from error
    store = dist.PrefixStore("comm", store)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    host = int(os.environ.get("GROUP_RANK", rank // local_world_size))
    store.set(f"place/{rank}", json.dumps([host, socket.gethostname()]))
    keys = [f"place/{other}" for other in range(world_size)]
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise JoinError(
            f"waited {timeout_s:g} s for all {world_size} ranks to come to {master}; missing: {missing} "
            f"(there are {local_world_size} on each host)"
        ) from error
    places = [json.loads(store.get(key)) for key in keys]
    hosts, names = (tuple(column) for column in zip(*places, strict=True))
    return JoinedRanks(rank, world_size, hosts, names, store, store.clone(), master)


def write(file: Path | None, text: str) -> bool:
    """Write the figures where somebody wants them; say so and return False if that fails."""
    try:
        if file is not None:
            file.write_text(text)
    except OSError as error:
        print(f"--json {file}: {error.strerror}", file=sys.stderr, flush=True)
        return False
    return True


def connect(place: JoinedRanks, backend: str | None, timeout_s: float) -> GroupRank:
    """Make the default process group: nccl where there is a GPU and gloo elsewhere, unless `backend` says.

    A collective that nobody answers fails after `timeout_s` on gloo; nccl would end the process, so it
    gets longer than anybody waits here.

    Raises:
        ValueError: nccl without a GPU.
        RuntimeError: whatever the backend says when its peers do not answer.
    """
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if backend == "nccl":
        if not torch.cuda.is_available():
            raise ValueError("--backend nccl needs a GPU, and torch sees none here; take --backend gloo")
        # More ranks than GPUs share them; whether that works is for NCCL to say.
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        timeout_s = 3 * timeout_s + 60
    dist.init_process_group(
        backend,
        store=place.store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if backend == "nccl" else None,
    )
    return GroupRank(place.rank, place.world_size, device)
