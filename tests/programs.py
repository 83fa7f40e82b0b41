"""Programs of this project as a user starts them, forked from a process that has loaded everything.

`python train.py` takes 4 s to import what it needs on a slow core; forked it starts at once. The program
has its own arguments, environment, directory, session, standard streams and exit code. It lacks the start and end
of an interpreter; tests of these, and of torchrun itself, start a real one. Settings that any process of the
session has composed it takes from there: Hydra is half the time of a short run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hydra.core.global_hydra import GlobalHydra

from tests.hosts import Host
from tests.ranks import ROOT, enter_network, fork_server, place, rendezvous

# Neither an option, nor one of Hydra's own settings, nor text that the environment or the moment decides.
_OVERRIDE = re.compile(r"(?!-|\W*hydra)[^$]+")


@dataclass(frozen=True)
class Ended:
    """How a program ended; `code` is negative if a signal ended it."""

    code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


class Program:
    """A program that runs; `pid` also names its session and process group."""

    def __init__(self, process: ForkServerProcess, streams: Path) -> None:
        assert process.pid is not None
        self.pid, self._process, self._streams = process.pid, process, streams

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.exitcode

    def join(self, timeout_s: float | None = None) -> int | None:
        """The exit code, or None if it still runs after `timeout_s`."""
        self._process.join(timeout_s)
        return self.poll()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def ranks(self) -> list[int]:
        """The pids of a launcher's ranks that live, by rank: its forked children, not executed programs."""
        found = []
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                found += [int(pid) for pid in (task / "children").read_text().split()]
        return sorted(pid for pid in found if _command(pid) == _command(self.pid))

    @property
    def stdout(self) -> str:
        """Its output so far."""
        return (self._streams / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self._streams / "stderr").read_text(errors="replace")

    def wait(self, timeout_s: float = 200.0) -> Ended:
        """Wait for its end. Raises AssertionError with its output and stacks when it is not done in time."""
        if (code := self.join(timeout_s)) is None:
            self.send_signal(signal.SIGQUIT)
            self._process.join(2)
            raise AssertionError(f"still runs after {timeout_s} s\n{self.stdout}{self.stderr}")
        return Ended(code, self.stdout, self.stderr)


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@contextlib.contextmanager
def started(
    *argv: str,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    host: int | Host = 0,
    output: Path | None = None,
    forks: bool = False,
) -> Iterator[Program]:
    """Start `python ARGV` (a file, or -m and a module, then arguments); leaving kills it and its session.

    Args:
        env: added to this process's environment.
        host: a `Host` is the network namespace it runs in.
        output: a file to which both of its streams are appended.
        forks: what it starts by `trainer.launch.new_process`, ranks of launch=local and trials of a sweep, it forks.
    """
    with tempfile.TemporaryDirectory(prefix="program-") as streams:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        arguments = (argv, environment, cwd, Path(streams), host, forks)
        process = fork_server().Process(target=_main, args=arguments)
        for name in ("stdout", "stderr"):
            if output is not None:
                (Path(streams) / name).symlink_to(output)
            (Path(streams) / name).touch()
        process.start()
        try:
            yield Program(process, Path(streams))
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # its loader's workers, too
            process.kill()
            process.join()
            process.close()


def finish(
    *argv: str,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    timeout_s: float = 200.0,
    forks: bool = False,
) -> Ended:
    """Run `python ARGV` to its end, as `started`."""
    with started(*argv, env=env, cwd=cwd, forks=forks) as program:
        return program.wait(timeout_s)


def torchrun(ranks: int, *options: str) -> tuple[str, ...]:
    """The command for train.py under torchrun, without overrides. Torchrun itself forks the ranks, too."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *options)
    return (*launcher, "--run-path", "--start-method=fork", str(ROOT / "train.py"))


@contextlib.contextmanager
def started_ranks(
    where: int | Sequence[int | Host],
    *argv: str,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    forks: bool = False,
) -> Iterator[list[Program]]:
    """Ranks, each a separate program in torchrun's environment, without a torchrun that watches them.

    Args:
        where: the number of ranks on one host, or the host of each, as in `run_ranks`.
    """
    hosts = [0] * where if isinstance(where, int) else list(where)
    with contextlib.ExitStack() as stack:
        meeting = stack.enter_context(rendezvous(hosts[0]))
        yield [
            stack.enter_context(
                started(
                    *argv,
                    env={**meeting, **place(rank, hosts), **(env or {})},
                    cwd=cwd,
                    host=host,
                    forks=forks,
                )
            )
            for rank, host in enumerate(hosts)
        ]


def finish_ranks(
    where: int | Sequence[int | Host],
    *argv: str,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    timeout_s: float = 200.0,
) -> list[Ended]:
    """Run ranks to the end of each, as `started_ranks`."""
    with started_ranks(where, *argv, env=env, cwd=cwd) as programs:
        deadline = time.monotonic() + timeout_s
        return [program.wait(max(0.0, deadline - time.monotonic())) for program in programs]


def _main(
    argv: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path,
    streams: Path,
    host: int | Host,
    forks: bool,
) -> None:
    os.setsid()
    end_with_parent()
    enter_network(host)
    for number, name, mode in ((0, os.devnull, "r"), (1, "stdout", "a"), (2, "stderr", "a")):
        with (streams / name).open(mode) as file:
            os.dup2(file.fileno(), number)
    if forks:
        fork_what_starts()
    _program(argv, environment, cwd)


def fork_what_starts() -> None:
    """From now on this process forks what `trainer.launch.new_process` would start as a new program."""
    from trainer.launch import new_process

    new_process.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": _forked})  # type: ignore[assignment]


def _program(argv: Sequence[str], environment: Mapping[str, str], cwd: Path) -> None:
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.register(signal.SIGQUIT, all_threads=True, chain=True)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    _compose_once_in_a_session()
    try:
        if argv[0] == "-m":
            sys.argv, sys.path[0] = list(argv[1:]), str(cwd)
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = list(argv), str((cwd / argv[0]).resolve().parent)
            runpy.run_path(argv[0], run_name="__main__")
    except KeyboardInterrupt:  # as Python ends on it
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def _compose_once_in_a_session() -> None:
    """Have train.py take its settings from `runs.settings`; Hydra's options, and what fails, stay Hydra's own."""
    from tests import runs
    from trainer import cli, config

    compose, load = cli.compose, config.load

    def found() -> list[Any]:
        if all(_OVERRIDE.fullmatch(word) for word in sys.argv[1:]):
            with contextlib.suppress(Exception):
                return [runs.settings(*sys.argv[1:])]
        return compose()

    cli.compose = found
    kept = {"load": lambda settings: settings if isinstance(settings, config.Config) else load(settings)}
    cli.config = SimpleNamespace(**{**vars(config), **kept})  # type: ignore[assignment]


def _forked(
    command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int] = (), **popen: Any
) -> subprocess.Popen[Any]:
    """subprocess.Popen of `python ...`, whose child goes on as a copy of this process instead of executing it."""
    argv = [word for word in command[1:] if word != "-P"]

    def child() -> None:
        kept = {0, 1, 2, *pass_fds, resource_tracker.getfd()}
        # Closed, among them the pipe on which Popen waits for the program. Their numbers stay taken: objects
        # of the parent close them once more, when the garbage collector comes to them.
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            if fd not in kept and fd != nothing:
                os.dup2(nothing, fd, inheritable=False)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Popen has restored the default action, which ends the process; a new interpreter ignores SIGPIPE.
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        GlobalHydra.instance().clear()  # a sweep starts its trials from within Hydra
        gc.enable()
        # torch replaces its thread pool at the first use after a fork, and autograd's threads, which all use
        # it as they start, abort if one finds none meanwhile.
        torch.set_num_threads(torch.get_num_threads())
        code: object = 0
        try:
            _program(argv, env, Path.cwd())
        except SystemExit as end:
            code = end.code
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        if isinstance(code, str):
            print(code, file=sys.stderr)
        os._exit(code if isinstance(code, int) else int(code is not None))

    return subprocess.Popen(command, env=env, pass_fds=pass_fds, preexec_fn=child, **popen)


def end_with_parent() -> None:
    """Have the kernel kill this session when pytest ends in any way, without a thread that watches."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, os.O_ASYNC)
