"""How the ranks of a run find each other: in torchrun's store, behind a port of rank 0's, or in a file."""

import itertools
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

import torch.distributed as dist

from trainer.errors import UserError
from trainer.launch.place import LISTENING, Place

_runs = itertools.count()


def meet(here: Place, timeout: timedelta) -> tuple[dist.Store, list[int]]:
    """Return the store in which the ranks meet, once each has signed it, and the host of every rank.

    Rank 0 counts the others in and then lets them go, so that nobody takes signatures from an earlier run
    for its peers'.

    Raises:
        UserError: a port that is taken, a file that cannot be written or that an earlier run left.
        TimeoutError: ranks that did not arrive within `timeout`, named.
    """
    if here.init_method is None:
        return dist.HashStore(), [0]
    shown = f"{timeout.total_seconds():.0f} s (distributed.timeout_s)"
    try:
        store, is_stale = _open(here.init_method, here, timeout)
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"the port of {here.init_method} is taken on this host, by another run perhaps; give another "
                "in MASTER_PORT or distributed.init_method"
            ) from error
        raise TimeoutError(
            f"rank {here.rank} waited {shown} for rank 0 to open {here.init_method}; does it run on that "
            "host, and can this one reach it?"
        ) from error
    # A second run in the same processes meets in the same store, and must not read what the first left.
    store = dist.PrefixStore(f"run_{next(_runs)}", store)
    if is_stale:
        store.set("met", "stale")
    if is_stale or store.check([f"arrived/{here.rank}"]):
        raise _stale(here)
    store.set(f"arrived/{here.rank}", socket.gethostname() if here.host is None else str(here.host))
    arrivals = [f"arrived/{rank}" for rank in range(here.world_size)]
    try:
        store.wait(arrivals if here.rank == 0 else ["met"], timeout)
    except RuntimeError as error:
        missing = [rank for rank, key in enumerate(arrivals) if not store.check([key])] or [0]
        raise TimeoutError(f"waited {shown} for all {here.world_size} ranks; missing: {missing}") from error
    if here.rank == 0:
        store.set("met", "yes")
    elif store.get("met") != b"yes":
        raise _stale(here)
    names = [store.get(key) for key in arrivals]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return store, [numbers[name] for name in names]


def on_this_host(here: Place, hosts: list[int]) -> tuple[int, int]:
    """Local rank and local world size: as told, or else counted in `hosts`, the host of every rank."""
    if here.local_rank is not None and here.local_world_size is not None:
        return here.local_rank, here.local_world_size
    beside = [rank for rank, host in enumerate(hosts) if host == hosts[here.rank]] or [here.rank]
    return beside.index(here.rank), len(beside)


def leave(here: Place) -> None:
    """Before the ranks part, clear the file in which they met, for the next run to meet in (a collective)."""
    if here.init_method is not None and here.init_method.startswith("file:"):
        dist.barrier()  # nobody needs it any more ...
        if here.rank == 0:
            _file(here.init_method).unlink(missing_ok=True)
        dist.barrier()  # ... and nobody meets in it before it is gone


def _open(init_method: str, here: Place, timeout: timedelta) -> tuple[dist.Store, bool]:
    """The store, and whether rank 0 found that an earlier run has left it."""
    url = urlsplit(init_method)
    if url.scheme == "file":
        return _open_file(_file(init_method), here, timeout)
    if url.scheme == "env":
        return next(iter(dist.rendezvous(init_method, here.rank, here.world_size, timeout=timeout)))[0], False
    listening = os.environ.pop(LISTENING, None) if here.rank == 0 else None  # one socket, for one store
    store = dist.TCPStore(
        str(url.hostname),
        int(url.port or 0),
        here.world_size,
        is_master=here.rank == 0,
        timeout=timeout,
        wait_for_workers=False,  # `meet` waits, and can name who is missing
        multi_tenant=True,
        master_listen_fd=None if listening is None else int(listening),
    )
    return store, False


def _open_file(path: Path, here: Place, timeout: timedelta) -> tuple[dist.Store, bool]:
    """Rank 0 alone makes the file, so that one which it finds there is an earlier run's.

    The store is not told how many come: it would take the file away after as many had closed it.
    """
    if here.rank == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_stale = path.exists() and path.stat().st_size > 0
            path.touch()
        except OSError as error:
            raise UserError(f"distributed.init_method={here.init_method}: {error.strerror}") from error
        store = dist.FileStore(str(path))
        store.set("made", "")
        return store, is_stale
    deadline = time.monotonic() + timeout.total_seconds()
    while not (path.exists() and path.stat().st_size > 0):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank {here.rank} waited {timeout.total_seconds():.0f} s (distributed.timeout_s) for rank 0 "
                f"to write {path}; did it start, and is that a disk that all hosts share?"
            )
        time.sleep(0.05)
    return dist.FileStore(str(path)), False


def _file(init_method: str) -> Path:
    return Path(unquote(urlsplit(init_method).path))


def _stale(here: Place) -> UserError:
    return UserError(
        f"distributed.init_method={here.init_method} holds what an earlier run left (or rank {here.rank} was "
        "started twice); delete the file, or name one that does not exist"
    )
