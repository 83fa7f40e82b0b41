"""Run a function in several real ranks, each a process forked from one that has loaded everything.

Importing torch and what else a run needs costs seconds, so the standard library's fork server imports it once
per pytest session (tests/preload.py), from the moment when this file is imported. tests/programs.py starts
whole programs in the same way. What a first run costs more than the next (pages to copy, threads and caches to
make) is saved, too: a rank that is as good as new after a function takes the next one (tests/used_process.py).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import faulthandler
import io
import multiprocessing
import os
import pickle
import random
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.hosts import Host
from tests.used_process import UsedProcess

ROOT = Path(__file__).parents[1]
_GRACE_S = 15.0  # how long the others may take to notice that a rank has failed
_CLONE_NEWNET = 0x40000000
_MOST_LIVE = 4


def fork_server() -> ForkServerContext:
    """Start the server, unless it runs; it loads in the background, and the first rank waits for it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", str(ROOT), prepend=os.pathsep
        )  # before Python 3.12 it has its own sys.path
        forkserver.ensure_running()
    return context


if os.environ.get("RINGMASTER_TESTS_OF") == str(os.getpid()):  # pytest itself, not a rank that imports a test
    fork_server()


class RankFailure(AssertionError):  # noqa: N818
    """Some rank raised, died or hung.

    `reports` maps each such rank to its traceback or stack; `results` holds what the others returned.
    """

    def __init__(self, reports: dict[int, str], results: dict[int, Any]) -> None:
        self.reports, self.results = reports, results
        super().__init__("\n".join(f"--- rank {rank}: {text}" for rank, text in sorted(reports.items())))


@dataclasses.dataclass(frozen=True, eq=False)
class _Rank:
    """A process that calls one function after another, until this end of the pipe is closed."""

    process: BaseProcess
    pipe: Connection
    stacks: Path

    @classmethod
    def fork(cls, host: int | Host) -> _Rank:
        context = fork_server()
        ours, theirs = context.Pipe()
        number, stacks = tempfile.mkstemp(prefix="rank-")
        os.close(number)
        process = context.Process(target=_rank_main, args=(theirs, host, Path(stacks)))
        process.start()
        theirs.close()
        return cls(process, ours, Path(stacks))

    def is_there(self) -> bool:
        return self.process.is_alive() and not self.pipe.poll()

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()
        self.process.close()
        self.stacks.unlink(missing_ok=True)


_live: list[_Rank] = []


def live_pids() -> set[int]:
    """Of the ranks that wait for the next function."""
    return {rank.process.pid for rank in _live if rank.process.pid is not None}


@atexit.register
def _end_live() -> None:
    while _live:
        _live.pop().end()


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 200.0,
    init: bool = True,
    hosts: Sequence[int | Host] | None = None,
    env: dict[str, str] | None = None,
    fresh: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` in `world_size` processes and return what they returned, by rank.

    `fn` and its arguments travel as pickles, so `fn` stands at the top level of a module; tensors come back
    on the CPU. The environment is torchrun's. With `init` the default gloo group exists before `fn` and is
    destroyed after it.

    Args:
        timeout_s: for the call as a whole; a rank not done by then is killed and named with its stacks.
        hosts: the host of each rank, in rank order: plain numbers only set LOCAL_RANK and its companions,
            a `Host` moves the rank into that network namespace.
        env: added to the environment of every rank.
        fresh: in processes in which nothing has run: for what asks about the process itself.

    Raises:
        RankFailure: a rank raised, died or hung.
    """
    hosts = list(hosts) if hosts is not None else [0] * world_size
    assert len(hosts) == world_size, f"{len(hosts)} hosts named for {world_size} ranks"
    call = pickle.dumps((fn, args, kwargs))
    may_live = not fresh and env is None and all(isinstance(host, int) for host in hosts)
    with contextlib.ExitStack() as stack:
        shared = {**os.environ, **stack.enter_context(rendezvous(hosts[0])), **(env or {})}
        ranks = []
        for rank, host in enumerate(hosts):
            while may_live and _live and not _live[0].is_there():
                _live.pop(0).end()
            ranks.append(_live.pop(0) if may_live and _live else _Rank.fork(host))
            stack.callback(lambda mine=ranks[-1]: None if mine in _live else mine.end())
            ranks[-1].pipe.send((call, init, timeout_s, {**shared, **place(rank, hosts)}))
        results, reports, used = _collect([rank.pipe for rank in ranks], time.monotonic() + timeout_s)
        if may_live and not reports and not used and len(results) == world_size:
            _live[:0] = ranks[: max(0, _MOST_LIVE - len(_live))]
        spoken = results.keys() | reports.keys()
        for rank, mine in enumerate(ranks):
            if mine in _live:
                continue
            mine.pipe.close()
            mine.process.join(_GRACE_S if rank in spoken else 0)
            if mine.process.is_alive():
                verb = "returned, but did not end" if rank in spoken else "did not finish"
                reports[rank] = f"{verb}; {_stacks_of(mine.process.pid, mine.stacks)}"
            elif mine.process.exitcode or reports.get(rank) == "":
                reports[rank] = f"died with exit code {mine.process.exitcode}"
    if reports:
        raise RankFailure(reports, results)
    return [results[rank] for rank in range(world_size)]


def _collect(
    pipes: list[Connection], deadline: float
) -> tuple[dict[int, Any], dict[int, str], dict[int, str]]:
    """Results and reports until every rank has spoken, or the deadline, or the grace after a failure; and what
    ranks are not as new for."""
    results: dict[int, Any] = {}
    reports: dict[int, str] = {}
    used: dict[int, str] = {}
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(open_pipes), left):
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                succeeded, payload, left = pipe.recv()
            except (EOFError, ConnectionResetError):
                reports[rank] = ""  # it died without a word: its exit code is all there is
            else:
                if left:
                    used[rank] = left
                if succeeded:
                    results[rank] = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=False)
                else:
                    reports[rank] = payload
        if reports:
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    return results, reports, used


def free_port() -> int:
    """A free port of this host, below those that the kernel assigns, so that it stays free."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("100 ports drawn by chance are all taken")


@contextlib.contextmanager
def rendezvous(first: int | Host) -> Iterator[dict[str, str]]:
    """The variables by which ranks find each other."""
    if isinstance(first, Host):  # a namespace has all ports to itself, so rank 0 may open a fixed one
        yield {"MASTER_ADDR": first.address, "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": first.interface}
        return
    # A store that listens already leaves no free port to race for; torchrun's agent does the same.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def place(rank: int, hosts: list[int | Host]) -> dict[str, str]:
    """The variables that torchrun sets for a rank."""
    distinct = list(dict.fromkeys(hosts))
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_RANK": str(hosts[:rank].count(hosts[rank])),
        "LOCAL_WORLD_SIZE": str(hosts.count(hosts[rank])),
        "GROUP_RANK": str(distinct.index(hosts[rank])),
        "GROUP_WORLD_SIZE": str(len(distinct)),
        "OMP_NUM_THREADS": "1",
    }


def _rank_main(pipe: Connection, host: int | Host, stacks: Path) -> None:
    """Call what comes, until something fails or stays behind that the next function must not meet."""
    with stacks.open("w") as stack_file:
        faulthandler.register(signal.SIGQUIT, file=stack_file, all_threads=True)
        torch.set_num_threads(1)
        enter_network(host)
        process, left = UsedProcess(), ""
        with contextlib.suppress(EOFError, ConnectionResetError):  # the other end was closed
            while not left:
                call, init, timeout_s, environment = pipe.recv()
                # Should pytest itself be killed, nobody else would end this process.
                faulthandler.dump_traceback_later(timeout_s + 2 * _GRACE_S, exit=True, file=stack_file)
                os.environ.clear()
                os.environ.update(environment)
                try:
                    fn, args, kwargs = pickle.loads(call)
                    process.lent()
                    result = _call(fn, args, kwargs, init)
                    del fn, args, kwargs
                    left = process.returned()
                    pipe.send((True, result, left))
                except BaseException:
                    # No destroy_process_group here: it may wait for peers that wait for us.
                    pipe.send((False, traceback.format_exc(), left := "an exception"))
                faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGQUIT)


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], init: bool) -> bytes:
    torch.set_num_threads(1)
    if init:
        dist.init_process_group("gloo")
    result = fn(*args, **kwargs)
    if init and dist.is_initialized():
        dist.destroy_process_group()
    buffer = io.BytesIO()
    torch.save(result, buffer)
    return buffer.getvalue()


def enter_network(host: int | Host) -> None:
    """Move this thread, still the only one, to a host (`os.setns` came with Python 3.12); not for a number."""
    if isinstance(host, Host):
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(host.namespace_path).open() as file:
            if libc.setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns({host.namespace_path})")


def _stacks_of(pid: int | None, file: Path) -> str:
    """What the threads of a process that hangs are doing; it writes that itself when signalled."""
    assert pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGQUIT)
    for _ in range(20):
        time.sleep(0.05)
        if text := file.read_text():
            return f"it was in\n{text}"
    return "it is stopped, so no stack"
