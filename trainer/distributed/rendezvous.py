"""How the ranks of a run find each other: in torchrun's store, behind a port of rank 0's, or in a file."""

import contextlib
import itertools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast
from urllib.parse import unquote, urlsplit

import torch.distributed as dist

from trainer.errors import StoppedBySignal, UserError
from trainer.launch.place import LISTENING, Place
from trainer.launch.signals import stop_signals_to

# Ranks load torch before they meet: on a busy machine, or from a cold disk, they come so far apart.
AT_LEAST_S = 60.0
_runs = itertools.count()
_T = TypeVar("_T")


def meet(
    here: Place, introduction: Mapping[str, Any], timeout: timedelta
) -> tuple[dist.Store, list[int], list[dict[str, Any]]]:
    """Return the store in which the ranks meet, once each has introduced itself, and by rank: the index of
    its host, and its introduction (plain values).

    Rank 0 counts the others in and then lets them go, so that nobody takes signatures from an earlier run
    for its peers'.

    Raises:
        UserError: a port that is taken, a file that cannot be written or that an earlier run left.
        StoppedBySignal: by one that asks for a stop meanwhile.
        TimeoutError: ranks that did not arrive within `timeout`, or AT_LEAST_S, named; or a store that does
            not answer.
    """
    if here.init_method is None:
        return dist.HashStore(), [0], [dict(introduction)]
    over, patience = threading.Event(), max(timeout, timedelta(seconds=AT_LEAST_S))
    try:
        met = _in_time(lambda: _meet(here, introduction, patience, over), here, patience)
    finally:
        over.set()
    met[0].set_timeout(timeout)  # from now on all are there
    return met


def _in_time(action: Callable[[], _T], here: Place, timeout: timedelta) -> _T:
    """The result of `action`, which may hang in a store whose host is cut off."""
    results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            results.put((action(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=run, name="rendezvous", daemon=True).start()
    try:
        with stop_signals_to(_give_up):  # no step boundary comes at which a stop would be heard
            value, error = results.get(timeout=timeout.total_seconds() + 2)
    except Empty:
        raise TimeoutError(
            f"the store at {here.init_method} (MASTER_ADDR={os.environ.get('MASTER_ADDR')}) has not answered "
            f"for {_shown(timeout)}: the host of rank 0 is cut off"
        ) from None
    if error is not None:
        raise error
    return cast(_T, value)


def _shown(patience: timedelta) -> str:
    return f"{patience.total_seconds():.0f} s (distributed.timeout_s, at least {AT_LEAST_S:.0f})"


def _give_up(number: int) -> None:
    raise StoppedBySignal(None)


def _meet(
    here: Place, introduction: Mapping[str, Any], timeout: timedelta, over: threading.Event
) -> tuple[dist.Store, list[int], list[dict[str, Any]]]:
    assert here.init_method is not None
    shown = _shown(timeout)
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
    if here.under_torchrun:
        store = _of_this_attempt(store, here, timeout, shown, over)
    else:
        # A second run in the same processes meets in the same store, and must not read what the first left.
        store = dist.PrefixStore(f"run_{next(_runs)}", store)
    if is_stale:
        store.set("met", "stale")
    if is_stale or store.check([f"arrived/{here.rank}"]):
        raise _stale(here)
    host = socket.gethostname() if here.host is None else str(here.host)
    store.set(f"arrived/{here.rank}", json.dumps([host, dict(introduction)]))
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
    names, introductions = zip(*(json.loads(store.get(key)) for key in arrivals), strict=True)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return store, [numbers[name] for name in names], list(introductions)


def _of_this_attempt(
    store: dist.Store, here: Place, timeout: timedelta, shown: str, over: threading.Event
) -> dist.Store:
    """The part of torchrun's store that this attempt has to itself.

    The agent keeps one store across restarts, agents of several hosts may count restarts differently, and a
    second run in the same processes meets there too. So rank 0 draws a name for the attempt and answers each
    rank that asks, under a name which that rank has drawn: those of earlier attempts ask no more.
    """
    name = secrets.token_hex(8)
    if here.rank == 0:
        threading.Thread(target=_answer, args=(store.clone(), name, over), daemon=True).start()
        return dist.PrefixStore(f"attempt/{name}", store)
    store.append("attempt/asking", f"{name} ")  # type: ignore[attr-defined]  # torch's stub forgets it
    try:
        store.wait([f"attempt/answer/{name}"], timeout)
    except RuntimeError as error:
        raise TimeoutError(f"waited {shown} for all {here.world_size} ranks; missing: [0]") from error
    return dist.PrefixStore(f"attempt/{store.get(f'attempt/answer/{name}').decode()}", store)


def _answer(store: dist.Store, name: str, over: threading.Event) -> None:
    """Tell `name` to all that ask, until all are there, or the run has given up: a thread that is within the
    store when Python ends takes the process down with SIGABRT."""
    answered: set[str] = set()
    with contextlib.suppress(RuntimeError):
        while not over.is_set() and not store.check([f"attempt/{name}/met"]):
            if store.check(["attempt/asking"]):
                asking = set(store.get("attempt/asking").decode().split())
                for other in asking - answered:
                    store.set(f"attempt/answer/{other}", name)
                answered |= asking
            time.sleep(0.01)


def on_this_host(here: Place, hosts: list[int]) -> tuple[int, int]:
    """Local rank and local world size: as told, or else counted in `hosts`, the host of every rank."""
    if here.local_rank is not None and here.local_world_size is not None:
        return here.local_rank, here.local_world_size
    beside = [rank for rank, host in enumerate(hosts) if host == hosts[here.rank]] or [here.rank]
    return beside.index(here.rank), len(beside)


def leave(here: Place, let_go: Callable[[], None]) -> None:
    """Before the ranks part, clear the file in which they met, for the next run to meet in (a collective).

    Args:
        let_go: ends whatever else of this process uses the store: writing to it would make the file anew.
    """
    if here.init_method is not None and here.init_method.startswith("file:"):
        let_go()
        dist.barrier()  # nobody needs it any more ...
        if here.rank == 0:
            with contextlib.suppress(OSError):  # of which the next run tells: this one has ended well
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
                f"rank {here.rank} waited {_shown(timeout)} for rank 0 "
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
