"""The processes of one attempt of launch=local: started when it begins, or before that, to stand by."""

import contextlib
import json
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from trainer.launch import fresh
from trainer.launch.place import LISTENING

_STANDBY = "trainer.standby"
_BEGUN = "rank"  # the name of a standby's main thread from then on, for whom counts ranks


class LocalRanks:
    """Processes that are told their rank and their port when they start, and their command line at `begin`.

    Args:
        processes: how many.
        module: run this module in place of train.py.

    Attributes:
        started: the ranks of the attempt, once it has begun.
    """

    def __init__(self, processes: int, module: str | None = None) -> None:
        # A socket that already listens avoids a race for a free port: rank 0 inherits it.
        self._server = socket.create_server(("127.0.0.1", 0))
        self._processes, self._module = processes, module
        self.started: list[subprocess.Popen[bytes]] = []
        self._standbys: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        self._printers: list[threading.Thread] = []

    def stand_by(self, count: int) -> bool:
        """Start the next of `count` standbys, when the one before is ready; return whether all are.

        One after another, since the ranks of the attempt before are at work. Call it from the thread that
        calls `begin`: standbys end with it. One that has ended is not replaced.
        """
        if self._standbys and not _is_ready(*self._standbys[-1]):
            return False
        if len(self._standbys) == count:
            return True
        here, there = socket.socketpair()
        with there:
            command = [str(there.fileno())]
            self._standbys.append((self._start(command, len(self._standbys), _STANDBY, there), here))
        return False

    def begin(self, argv: Sequence[str]) -> int:
        """Begin the attempt with this command line; return how many of its ranks have stood by."""
        begun = 0
        with self._server:
            for rank in range(self._processes):
                process = self._standby(rank, argv)
                begun += process is not None
                self.started.append(process or self._start(argv, rank, self._module))
        return begun

    def end(self) -> None:
        """Kill what still runs."""
        self._server.close()
        standbys = [process for process, _ in self._standbys]
        for process in {*self.started, *standbys}:
            process.kill()
            process.wait()
        for _, channel in self._standbys:
            channel.close()
        for printer in self._printers:
            printer.join(1)

    def _standby(self, rank: int, argv: Sequence[str]) -> subprocess.Popen[bytes] | None:
        """The standby of this rank, which begins now; None if there is none, or it has ended."""
        if rank >= len(self._standbys):
            return None
        process, channel = self._standbys[rank]
        if process.poll() is not None:
            return None
        with contextlib.suppress(OSError):  # it stays open: one that still imports has yet to say it is ready
            channel.sendall(json.dumps(list(argv)).encode() + b"\n")
            return process
        return None

    def _start(
        self, argv: Sequence[str], rank: int, module: str | None, channel: socket.socket | None = None
    ) -> subprocess.Popen[bytes]:
        address, port = self._server.getsockname()
        told: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
        told |= {"WORLD_SIZE": self._processes, "LOCAL_WORLD_SIZE": self._processes}
        told |= {"MASTER_ADDR": address, "MASTER_PORT": port}
        inherited = [] if channel is None else [channel]
        if rank == 0:
            told |= {LISTENING: self._server.fileno()}
            inherited.append(self._server)
        pipe = None if rank == 0 and _is_inherited() else subprocess.PIPE
        process = fresh.start(
            argv,
            module=module,
            launcher="local",
            environment={name: str(value) for name, value in told.items()},
            pass_fds=[each.fileno() for each in inherited],
            stdout=pipe,
            stderr=pipe,
        )
        for stream, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if stream:
                self._printers.append(threading.Thread(target=_print, args=(stream, out, rank), daemon=True))
                self._printers[-1].start()
        return process


def received_command_line(channel: socket.socket) -> list[str] | None:
    """In a standby: say that it is ready, and wait for its command line; None if the launcher has ended."""
    with channel, channel.makefile("rw") as line:
        line.write("\n")
        line.flush()
        told = line.readline()
    if not told.endswith("\n"):
        return None
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(_BEGUN)
    argv: list[str] = json.loads(told)
    return argv


def stands_by(pid: int) -> bool:
    """Whether this process is a standby whose attempt has not begun."""
    try:
        is_standby = _STANDBY.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return is_standby and Path(f"/proc/{pid}/comm").read_text().strip() != _BEGUN
    except OSError:
        return False


def _is_ready(process: subprocess.Popen[bytes], channel: socket.socket) -> bool:
    """Whether a standby waits for its command line, or has ended."""
    return process.poll() is not None or bool(select.select([channel], [], [], 0)[0])


def _print(pipe: IO[bytes], out: IO[str], rank: int) -> None:
    prefix = f"[rank {rank}] " if rank else ""
    for line in pipe:
        text = line.decode(errors="replace")
        out.write(text if text.startswith(prefix) else prefix + text)
        out.flush()


def _is_inherited() -> bool:
    """Whether a child's standard streams are the same as this process's; not so in a notebook."""
    try:
        return (sys.stdout.fileno(), sys.stderr.fileno()) == (1, 2)
    except (OSError, ValueError):
        return False
