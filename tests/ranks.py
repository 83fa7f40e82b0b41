"""Run a function on several real ranks, each a process forked from one that has imported everything.

Imports take seconds, so a fork server imports once per pytest session (tests/preload.py), beginning when this
file is imported. tests/programs.py starts programs in the same way. The first run in a process also takes
longer than later ones, so a rank that a function has left clean is used again (tests/used_process.py).
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
_GRACE_S = 15.0  # time in which other ranks must notice a failed rank
_CLONE_NEWNET = 0x40000000
_MAX_IDLE = 4


def fork_server() -> ForkServerContext:
    """Start the server if it isn't running; it imports in the background, and the first rank waits for it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", str(ROOT), prepend=os.pathsep
        )  # before Python 3.12 it has its own sys.path
        forkserver.ensure_running()
    return context


if os.environ.get("RINGMASTER_TESTS_OF") == str(os.getpid()):  # in pytest itself, not in a rank
    fork_server()


class RankFailure(AssertionError):  # noqa: N818
    """A rank raised an error, died or hung.

    `reports` contains the traceback or stack of each such rank; `results` contains the results of the others.
    """

    def __init__(self, reports: dict[int, str], results: dict[int, Any]) -> None:
        self.reports, self.results = reports, results
        super().__init__("\n".join(f"--- rank {rank}: {text}" for rank, text in sorted(reports.items())))


@dataclasses.dataclass(frozen=True, eq=False)
class _Rank:
    """A process that calls one function after another, until the pipe is closed."""

    process: BaseProcess
    pipe: Connection
    stacks: Path

    @classmethod
    def fork(cls, host: int | Host) -> _Rank:
        context = fork_server()
        own_end, rank_end = context.Pipe()
        number, stacks = tempfile.mkstemp(prefix="rank-")
        os.close(number)
        process = context.Process(target=_rank_main, args=(rank_end, host, Path(stacks)))
        process.start()
        rank_end.close()
        return cls(process, own_end, Path(stacks))

    def is_usable(self) -> bool:
        return self.process.is_alive() and not self.pipe.poll()

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()
        self.process.close()
        self.stacks.unlink(missing_ok=True)


_idle: list[_Rank] = []


def idle_pids() -> set[int]:
    """Return the pids of ranks that wait for the next function."""
    return {rank.process.pid for rank in _idle if rank.process.pid is not None}


@atexit.register
def _end_idle() -> None:
    while _idle:
        _idle.pop().end()


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
    """Call `fn(*args, **kwargs)` in `world_size` processes, and return the results by rank.

    `fn` and its arguments must be picklable; tensors are returned on the CPU. The environment is torchrun's.

    Args:
        timeout_s: for the whole call; ranks that have not finished are killed and reported with their stacks.
        init: whether to create the default gloo group before `fn`, and destroy it after.
        hosts: the host of each rank. A number only determines LOCAL_RANK and similar variables; a `Host` moves
            the rank into its network namespace.
        env: additional environment variables of all ranks.
        fresh: whether to use new processes, for tests of the process itself.

    Raises:
        RankFailure: a rank raised an error, died or hung.
    """
    hosts = list(hosts) if hosts is not None else [0] * world_size
    assert len(hosts) == world_size, f"{len(hosts)} hosts for {world_size} ranks"
    call = pickle.dumps((fn, args, kwargs))
    may_reuse = not fresh and env is None and all(isinstance(host, int) for host in hosts)
    with contextlib.ExitStack() as stack:
        shared = {**os.environ, **stack.enter_context(rendezvous(hosts[0])), **(env or {})}
        ranks = []
        for rank, host in enumerate(hosts):
            while may_reuse and _idle and not _idle[0].is_usable():
                _idle.pop(0).end()
            ranks.append(_idle.pop(0) if may_reuse and _idle else _Rank.fork(host))
            stack.callback(lambda rank=ranks[-1]: None if rank in _idle else rank.end())
            ranks[-1].pipe.send((call, init, timeout_s, {**shared, **rank_variables(rank, hosts)}))
        results, reports, used = _collect([rank.pipe for rank in ranks], time.monotonic() + timeout_s)
        if may_reuse and not reports and not used and len(results) == world_size:
            _idle[:0] = ranks[: max(0, _MAX_IDLE - len(_idle))]
        answered = results.keys() | reports.keys()
        for rank, used_rank in enumerate(ranks):
            if used_rank in _idle:
                continue
            used_rank.pipe.close()
            used_rank.process.join(_GRACE_S if rank in answered else 0)
            if used_rank.process.is_alive():
                verb = "returned, but did not end" if rank in answered else "did not finish"
                reports[rank] = f"{verb}; {_stacks_of(used_rank.process.pid, used_rank.stacks)}"
            elif used_rank.process.exitcode or reports.get(rank) == "":
                reports[rank] = f"died with exit code {used_rank.process.exitcode}"
    if reports:
        raise RankFailure(reports, results)
    return [results[rank] for rank in range(world_size)]


def _collect(
    pipes: list[Connection], deadline: float
) -> tuple[dict[int, Any], dict[int, str], dict[int, str]]:
    """Wait for all ranks, until the deadline or a grace period after a failure.

    Returns results, reports, and the reasons why ranks cannot be used again, by rank.
    """
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
                reports[rank] = ""  # it died; only its exit code is known
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
    """Return a free port of this host, outside the range that the kernel assigns, so that it stays free."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("none of 100 random ports is free")


@contextlib.contextmanager
def rendezvous(first: int | Host) -> Iterator[dict[str, str]]:
    """Yield the rendezvous variables of ranks."""
    if isinstance(first, Host):  # all ports of a namespace are free, so rank 0 can use a fixed one
        yield {"MASTER_ADDR": first.address, "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": first.interface}
        return
    # A store that is already listening avoids races for a port; torchrun's agent does the same.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def rank_variables(rank: int, hosts: list[int | Host]) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank."""
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
    """Call functions from the pipe, until one fails or leaves something behind."""
    with stacks.open("w") as stack_file:
        faulthandler.register(signal.SIGQUIT, file=stack_file, all_threads=True)
        torch.set_num_threads(1)
        enter_network(host)
        process, left = UsedProcess(), ""
        with contextlib.suppress(EOFError, ConnectionResetError):  # the other end was closed
            while not left:
                call, init, timeout_s, environment = pipe.recv()
                # If pytest is killed, no other process ends this one.
                faulthandler.dump_traceback_later(timeout_s + 2 * _GRACE_S, exit=True, file=stack_file)
                os.environ.clear()
                os.environ.update(environment)
                try:
                    fn, args, kwargs = pickle.loads(call)
                    process.before_use()
                    result = _call(fn, args, kwargs, init)
                    del fn, args, kwargs
                    left = process.after_use()
                    pipe.send((True, result, left))
                except BaseException:
                    # No destroy_process_group, which may wait for ranks that wait for this one.
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
    """Move this thread, the only one, into the namespace of a `Host` (`os.setns` requires Python 3.12)."""
    if isinstance(host, Host):
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(host.namespace_path).open() as file:
            if libc.setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns({host.namespace_path})")


def _stacks_of(pid: int | None, file: Path) -> str:
    """Make a process that hangs write the stacks of its threads, and return them."""
    assert pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGQUIT)
    for _ in range(20):
        time.sleep(0.05)
        if text := file.read_text():
            return f"it was in\n{text}"
    return "no stacks, because it is stopped"
