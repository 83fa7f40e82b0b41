"""How the ranks of a run find each other: in torchrun's store, at a port of rank 0, or in a file."""

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
from trainer.launch.rank_info import ENV, LISTENING, RankInfo
from trainer.launch.signals import stop_signals_to

# Ranks load torch before they meet: on a busy machine, or from a cold disk, they may arrive this far apart.
AT_LEAST_S = 60.0
_T = TypeVar("_T")


def join(
    here: RankInfo,
    introduction: Mapping[str, Any],
    timeout: timedelta,
    is_stopped: Callable[[], bool] = lambda: False,
) -> tuple[dist.Store, list[int], list[dict[str, Any]]]:
    """Return the store in which the ranks meet and, by rank, the index of its host and its `introduction`
    (plain values). Ranks of one host see each other's processes and can share memory.

    Args:
        is_stopped: whether a signal asked for a stop before this call.

    Raises:
        UserError: the port is taken, the file cannot be written, or a rank was started twice.
        StoppedBySignal: a signal asked for a stop in the meantime.
        RetryableError: named ranks did not arrive within `timeout`, or AT_LEAST_S; or no answer of the store.
    """
    if here.init_method is None:
        return dist.HashStore(), [0], [dict(introduction)]
    over, patience = threading.Event(), max(timeout, timedelta(seconds=AT_LEAST_S))
    try:
        met = _in_time(lambda: _meet(here, introduction, patience, over), here, patience, is_stopped)
    finally:
        over.set()
    met[0].set_timeout(timeout)  # all ranks have arrived
    return met


def _in_time(
    action: Callable[[], _T], here: RankInfo, timeout: timedelta, is_stopped: Callable[[], bool]
) -> _T:
    """The result of `action`, which may hang in a store whose host is unreachable."""
    results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            results.put((action(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=run, name="rendezvous", daemon=True).start()
    try:
        with stop_signals_to(_give_up):  # no step boundary comes yet at which to stop
            if is_stopped():  # a rank that was still importing has ended, and never comes
                raise StoppedBySignal(None)
            value, error = results.get(timeout=timeout.total_seconds() + 2)
    except Empty:
        raise RetryableError(
            f"the store at {_store_address(here)} has not answered for {_shown(timeout)}: this host cannot "
            "reach the host of rank 0, or gets no answer from it"
        ) from None
    if error is not None:
        raise error
    return cast(_T, value)


def _shown(patience: timedelta) -> str:
    return f"{patience.total_seconds():.0f} s (distributed.timeout_s, at least {AT_LEAST_S:.0f})"


def _store_address(here: RankInfo) -> str:
    """Return the rendezvous address, for messages."""
    if here.init_method != ENV:
        return str(here.init_method)
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _give_up(number: int) -> None:
    raise StoppedBySignal(None)


def _meet(
    here: RankInfo, introduction: Mapping[str, Any], timeout: timedelta, over: threading.Event
) -> tuple[dist.Store, list[int], list[dict[str, Any]]]:
    assert here.init_method is not None
    shown = _shown(timeout)
    try:
        store = _open(here.init_method, here, timeout)
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"the port of {here.init_method} is taken on this host, perhaps by another run; set another "
                "in MASTER_PORT or distributed.init_method"
            ) from error
        raise RetryableError(
            f"rank {here.rank} waited {shown} for rank 0 to open {_store_address(here)}; check that rank 0 "
            "runs there, and that the two hosts can reach each other"
        ) from error
    store = _of_this_attempt(store, here, timeout, over)
    if store.check([f"arrived/{here.rank}"]):
        raise UserError(f"rank {here.rank} was started twice at {here.init_method}; start each rank once")
    host = socket.gethostname() if here.host is None else here.host
    own = f"{host} {surroundings()}", dict(introduction)
    try:
        arrived = gather_in_store(store, "arrived", here.rank, here.world_size, own, timeout)
    except RuntimeError as error:
        try:
            missing = [rank for rank in range(here.world_size) if not store.check([f"arrived/{rank}"])]
        except RuntimeError:
            raise RetryableError(
                f"rank 0, which holds the store at {_store_address(here)}, ended before all ranks had met; "
                "the output of rank 0 names the missing ranks"
            ) from error
        raise RetryableError(
            f"waited {shown} for all {here.world_size} ranks; missing: {missing}; these ranks were not "
            f"started, or their hosts cannot reach the store at {_store_address(here)}; read their output"
        ) from error
    names, introductions = zip(*arrived, strict=True)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return store, [numbers[name] for name in names], list(introductions)


def gather_in_store(
    store: dist.Store, name: str, rank: int, world_size: int, value: Any, timeout: timedelta
) -> list[Any]:
    """Return every rank's `value` (JSON), by rank, on every rank.

    Only rank 0 reads all values, so that each other rank makes a few calls, whatever the number of ranks.

    Raises:
        RuntimeError: the store can't be reached, or a rank set no value within `timeout`.
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


def _of_this_attempt(
    store: dist.Store, here: RankInfo, timeout: timedelta, over: threading.Event
) -> dist.Store:
    """This attempt's own part of the store, which may hold entries of others.

    torchrun's agent keeps one store across restarts, which agents of several hosts may count differently. A
    file outlives a run that failed. A second run in the same processes uses the same store. So rank 0
    draws a name for the attempt and answers each rank that asks, under a name which that rank has drawn:
    ranks of earlier attempts no longer ask.
    """
    name = secrets.token_hex(8)
    if here.rank == 0:
        answer = (store.clone(), name, over)
        threading.Thread(target=_answer, args=answer, daemon=True).start()
        return dist.PrefixStore(f"attempt/{name}", store)
    store.set(f"asking/{store.add('asked', 1)}", name)
    try:
        store.wait([f"answer/{name}"], timeout)
    except RuntimeError as error:
        way = ""
        if str(here.init_method).startswith("file:"):
            way = f"; check that it started, and that all hosts share the disk of {here.init_method}"
        raise RetryableError(
            f"waited {_shown(timeout)} for all {here.world_size} ranks; missing: [0]{way}"
        ) from error
    return dist.PrefixStore(f"attempt/{store.get(f'answer/{name}').decode()}", store)


def _answer(store: dist.Store, name: str, over: threading.Event) -> None:
    """Send `name` to all ranks that ask, until all have arrived or the run has given up: a thread that is in
    the store when Python ends takes the process down with SIGABRT."""
    seen, asking = 0, set[int]()
    with contextlib.suppress(RuntimeError):
        while not over.is_set():
            before, seen = seen, store.add("asked", 0)
            asking |= set(range(before + 1, seen + 1))
            for number in [number for number in asking if store.check([f"asking/{number}"])]:
                store.set(f"answer/{store.get(f'asking/{number}').decode()}", name)
                asking.remove(number)
            time.sleep(0.01)


def on_this_host(here: RankInfo, hosts: list[int]) -> tuple[int, int]:
    """Local rank and local world size: as given, or else counted in `hosts`, the host of every rank."""
    if here.local_rank is not None and here.local_world_size is not None:
        return here.local_rank, here.local_world_size
    beside = [rank for rank, host in enumerate(hosts) if host == hosts[here.rank]] or [here.rank]
    return beside.index(here.rank), len(beside)


def _open(init_method: str, here: RankInfo, timeout: timedelta) -> dist.Store:
    url = urlsplit(init_method)
    if url.scheme == "file":
        path = Path(unquote(url.path))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:
            raise kind_of(error)(f"distributed.init_method={init_method}: {error.strerror}") from error
        # Not told the number of ranks: it would delete the file after that many had closed it.
        return dist.FileStore(str(path))
    if url.scheme == "env":
        return next(iter(dist.rendezvous(init_method, here.rank, here.world_size, timeout=timeout)))[0]
    listening = os.environ.pop(LISTENING, None) if here.rank == 0 else None  # one socket, for one store
    return dist.TCPStore(
        str(url.hostname),
        int(url.port or 0),
        here.world_size,
        is_master=here.rank == 0,
        timeout=timeout,
        wait_for_workers=False,  # `join` waits, and can name missing ranks
        multi_tenant=True,
        master_listen_fd=None if listening is None else int(listening),
    )
