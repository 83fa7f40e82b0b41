"""The rendezvous of a run's ranks: in torchrun's store, at a port on rank 0's host, or in a file."""

import contextlib
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

from trainer.errors import RetryableError, StoppedBySignal, UserError, kind_of
from trainer.failures.processes import surroundings
from trainer.launch.rank_info import ENV, STORE_FD, RankInfo
from trainer.launch.signals import stop_signals_to

# Ranks load torch before the rendezvous: with a busy CPU or a slow disk, they may arrive this far apart.
AT_LEAST_S = 60.0
_T = TypeVar("_T")


def join(
    here: RankInfo,
    introduction: Mapping[str, Any],
    timeout: timedelta,
    is_stopped: Callable[[], bool] = lambda: False,
) -> tuple[dist.Store, list[int], list[dict[str, Any]]]:
    """Join the rendezvous of all ranks.

    Args:
        introduction: plain values that this rank sends to the other ranks.
        is_stopped: returns whether a signal has requested a stop.

    Returns:
        The store of the run, the index of each rank's host, and each rank's introduction. Ranks on one host
        see each other's processes and can share memory.

    Raises:
        UserError: the port is in use, the file cannot be written, or a rank was started twice.
        StoppedBySignal: a signal requested a stop.
        RetryableError: ranks did not arrive within `timeout`, or AT_LEAST_S if that is longer, or the store
            did not respond; the message names the ranks.
    """
    if here.init_method is None:
        return dist.HashStore(), [0], [dict(introduction)]
    done, patience = threading.Event(), max(timeout, timedelta(seconds=AT_LEAST_S))
    try:
        joined = _in_time(lambda: _join(here, introduction, patience, done), here, patience, is_stopped)
    finally:
        done.set()
    joined[0].set_timeout(timeout)  # all ranks have arrived
    return joined


def _in_time(
    action: Callable[[], _T], here: RankInfo, timeout: timedelta, is_stopped: Callable[[], bool]
) -> _T:
    """Return the result of `action`. Raise RetryableError if it hangs because the store is unreachable."""
    results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            results.put((action(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=run, name="rendezvous", daemon=True).start()
    try:
        with stop_signals_to(_stop):  # there is no step boundary at which to stop yet
            if is_stopped():  # a rank that was still importing has ended and will never arrive
                raise StoppedBySignal(None)
            value, error = results.get(timeout=timeout.total_seconds() + 2)
    except Empty:
        raise RetryableError(
            f"the store at {_store_address(here)} did not respond within {_shown(timeout)}; check that the "
            "host of rank 0 is up, and that this host can reach it"
        ) from None
    if error is not None:
        raise error
    return cast(_T, value)


def _shown(patience: timedelta) -> str:
    return f"{patience.total_seconds():.0f} s (distributed.timeout_s, at least {AT_LEAST_S:.0f})"


def _store_address(here: RankInfo) -> str:
    if here.init_method != ENV:
        return str(here.init_method)
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _stop(number: int) -> None:
    raise StoppedBySignal(None)


def _join(
    here: RankInfo, introduction: Mapping[str, Any], timeout: timedelta, done: threading.Event
) -> tuple[dist.Store, list[int], list[dict[str, Any]]]:
    assert here.init_method is not None
    shown = _shown(timeout)
    try:
        store = _open(here.init_method, here, timeout)
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"the port of {_store_address(here)} is already in use on this host, perhaps by another run; "
                "set another port in MASTER_PORT or distributed.init_method"
            ) from error
        raise RetryableError(
            f"rank {here.rank} waited {shown} for rank 0 to open {_store_address(here)}; check that rank 0 "
            "is running there, and that the two hosts can reach each other"
        ) from error
    store = _store_of_attempt(store, here, timeout, done)
    if store.check([f"arrived/{here.rank}"]):
        raise UserError(f"rank {here.rank} was started twice at {_store_address(here)}; start each rank once")
    host = socket.gethostname() if here.host is None else here.host
    own = f"{host} {surroundings()}", dict(introduction)
    try:
        arrived = gather_in_store(store, "arrived", here.rank, here.world_size, own, timeout)
    except RuntimeError as error:
        try:
            missing = [rank for rank in range(here.world_size) if not store.check([f"arrived/{rank}"])]
        except RuntimeError:
            raise RetryableError(
                f"rank 0, which serves the store at {_store_address(here)}, ended before all ranks had "
                "arrived; see the output of rank 0 for the missing ranks"
            ) from error
        raise RetryableError(
            f"waited {shown} for all {here.world_size} ranks; missing: {missing}; these ranks were not "
            f"started, or their hosts cannot reach the store at {_store_address(here)}; see their output"
        ) from error
    names, introductions = zip(*arrived, strict=True)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return store, [numbers[name] for name in names], list(introductions)


def gather_in_store(
    store: dist.Store, name: str, rank: int, world_size: int, value: Any, timeout: timedelta
) -> list[Any]:
    """Return the `value` (JSON) of every rank, in rank order, on every rank.

    Only rank 0 reads all values, so that each other rank makes a constant number of calls.

    Raises:
        RuntimeError: the store can't be reached, or a rank did not set a value within `timeout`.
    """
    store.set(f"{name}/{rank}", json.dumps(value))
    if rank == 0:
        keys = [f"{name}/{other}" for other in range(world_size)]
        store.wait(keys, timeout)
        store.set(name, json.dumps([json.loads(store.get(key)) for key in keys]))
    else:
        store.wait([name], timeout)
    gathered: list[Any] = json.loads(store.get(name))
    return gathered


def _store_of_attempt(
    store: dist.Store, here: RankInfo, timeout: timedelta, done: threading.Event
) -> dist.Store:
    """Return a view of the store that contains only the entries of this attempt.

    torchrun's agent keeps its store across restarts, and hosts may count restarts differently. A file remains
    after a failed run. A second run in the same processes uses the same store. Therefore, rank 0 draws a
    random name for the attempt. The other ranks request it under random names of their own, which ranks of
    earlier attempts never use.
    """
    name = secrets.token_hex(8)
    if here.rank == 0:
        arguments = (store.clone(), name, done)
        threading.Thread(target=_answer_requests, args=arguments, daemon=True).start()
        return dist.PrefixStore(f"attempt/{name}", store)
    store.set(f"asking/{store.add('asked', 1)}", name)
    try:
        store.wait([f"answer/{name}"], timeout)
    except RuntimeError as error:
        hint = ""
        if str(here.init_method).startswith("file:"):
            hint = f"; check that it was started, and that all hosts share the disk of {here.init_method}"
        raise RetryableError(
            f"waited {_shown(timeout)} for all {here.world_size} ranks; missing: [0]{hint}"
        ) from error
    return dist.PrefixStore(f"attempt/{store.get(f'answer/{name}').decode()}", store)


def _answer_requests(store: dist.Store, name: str, done: threading.Event) -> None:
    """Send `name` to each rank that requests it, until `done` is set.

    The thread must end before Python does: an exit during a call to the store would abort the process.
    """
    seen, requests = 0, set[int]()
    with contextlib.suppress(RuntimeError):
        while not done.is_set():
            before, seen = seen, store.add("asked", 0)
            requests |= set(range(before + 1, seen + 1))
            for number in [number for number in requests if store.check([f"asking/{number}"])]:
                store.set(f"answer/{store.get(f'asking/{number}').decode()}", name)
                requests.remove(number)
            time.sleep(0.01)


def local_rank_and_size(here: RankInfo, hosts: list[int]) -> tuple[int, int]:
    """Return the local rank and local world size, from the launcher or from the host of each rank."""
    if here.local_rank is not None and here.local_world_size is not None:
        return here.local_rank, here.local_world_size
    local_ranks = [rank for rank, host in enumerate(hosts) if host == hosts[here.rank]] or [here.rank]
    return local_ranks.index(here.rank), len(local_ranks)


def _open(init_method: str, here: RankInfo, timeout: timedelta) -> dist.Store:
    url = urlsplit(init_method)
    if url.scheme == "file":
        path = Path(unquote(url.path))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:
            raise kind_of(error)(f"distributed.init_method={init_method}: {error.strerror}") from error
        # Without the number of ranks, because FileStore would delete the file after that many had closed it.
        return dist.FileStore(str(path))
    if url.scheme == "env":
        return next(iter(dist.rendezvous(init_method, here.rank, here.world_size, timeout=timeout)))[0]
    descriptor = os.environ.pop(STORE_FD, None) if here.rank == 0 else None  # valid for a single store
    return dist.TCPStore(
        str(url.hostname),
        int(url.port or 0),
        here.world_size,
        is_master=here.rank == 0,
        timeout=timeout,
        wait_for_workers=False,  # `join` waits, and can name missing ranks
        multi_tenant=True,
        master_listen_fd=None if descriptor is None else int(descriptor),
    )
