"""Start programs as a user does, but forked from a process that has imported everything.

The imports of `python train.py` take 4 s on a slow core. A forked program has its own arguments, environment,
directory, session, standard streams and exit code, but no interpreter start and exit; tests of these, and of
torchrun itself, start a real one. Composed settings are cached for the session.
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
from tests.ranks import ROOT, enter_network, fork_server, rank_variables, rendezvous

# Not an option, not one of Hydra's own settings, and without interpolation.
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
    """A running program; `pid` is also the ID of its session and process group."""

    def __init__(self, process: ForkServerProcess, streams: Path) -> None:
        assert process.pid is not None
        self.pid, self._process, self._streams = process.pid, process, streams

    def poll(self) -> int | None:
        """Return the exit code, or None if the program is running."""
        return self._process.exitcode

    def join(self, timeout_s: float | None = None) -> int | None:
        """Return the exit code, or None if the program is still running after `timeout_s`."""
        self._process.join(timeout_s)
        return self.poll()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def ranks(self) -> list[int]:
        """Return the pids of a launcher's live ranks, which are its forked children."""
        found = []
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                found += [int(pid) for pid in (task / "children").read_text().split()]
        return sorted(pid for pid in found if _command(pid) == _command(self.pid))

    @property
    def stdout(self) -> str:
        """The output so far."""
        return (self._streams / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self._streams / "stderr").read_text(errors="replace")

    def wait(self, timeout_s: float = 200.0) -> Ended:
        """Wait for the end. Raises AssertionError with output and stacks after a timeout."""
        if (code := self.join(timeout_s)) is None:
            self.send_signal(signal.SIGQUIT)
            self._process.join(2)
            raise AssertionError(f"still running after {timeout_s} s\n{self.stdout}{self.stderr}")
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
    """Start `python ARGV` (a file, or -m and a module, then arguments); kill its session at the end.

    Args:
        env: additional environment variables.
        host: the network namespace of the program, if it is a `Host`.
        output: a file to which stdout and stderr are appended.
        forks: whether the program forks ranks of launch=local and trials of sweeps instead of executing them.
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
                os.killpg(process.pid, signal.SIGKILL)  # including data workers
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
    """Run `python ARGV` to its end; see `started`."""
    with started(*argv, env=env, cwd=cwd, forks=forks) as program:
        return program.wait(timeout_s)


def torchrun(ranks: int, *options: str) -> tuple[str, ...]:
    """Return the command for train.py under a torchrun that forks its ranks, without overrides."""
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
    """Start ranks as separate programs in torchrun's environment, but without torchrun.

    Args:
        where: the number of ranks on one host, or the host of each rank, as in `run_ranks`.
    """
    hosts = [0] * where if isinstance(where, int) else list(where)
    with contextlib.ExitStack() as stack:
        rendezvous_variables = stack.enter_context(rendezvous(hosts[0]))
        yield [
            stack.enter_context(
                started(
                    *argv,
                    env={**rendezvous_variables, **rank_variables(rank, hosts), **(env or {})},
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
    """Run ranks to their ends; see `started_ranks`."""
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
        fork_new_processes()
    _program(argv, environment, cwd)


def fork_new_processes() -> None:
    """Make `trainer.launch.new_process` fork this process instead of executing programs."""
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
    except KeyboardInterrupt:  # like Python
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def _compose_once_in_a_session() -> None:
    """Make train.py use `runs.settings`, except for Hydra's options and for errors."""
    from tests import runs
    from trainer import cli, config

    compose, load = cli.compose, config.load

    def found() -> list[Any]:
        if all(_OVERRIDE.fullmatch(word) for word in sys.argv[1:]):
            with contextlib.suppress(Exception):
                return [runs.settings(*sys.argv[1:])]
        return compose()

    cli.compose = found
    config.load = lambda settings: settings if isinstance(settings, config.Config) else load(settings)


def _forked(
    command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int] = (), **popen: Any
) -> subprocess.Popen[Any]:
    """Replace subprocess.Popen for `python ...`: the child continues as a copy of this process."""
    argv = [word for word in command[1:] if word != "-P"]

    def child() -> None:
        kept = {0, 1, 2, *pass_fds, resource_tracker.getfd()}
        # Close all others, including the pipe on which Popen waits. Their numbers stay in use, because objects of
        # the parent close them again when they are collected.
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            if fd not in kept and fd != nothing:
                os.dup2(nothing, fd, inheritable=False)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Popen has restored the default action; a new interpreter ignores SIGPIPE.
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        GlobalHydra.instance().clear()  # a sweep starts its trials from within Hydra
        gc.enable()
        # torch replaces its thread pool at the first use after a fork, and autograd's threads abort if they start
        # at that moment.
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
    """Make the kernel kill this session when pytest ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, os.O_ASYNC)
