"""Start torchrun and its ranks by forking, so that they do not import anything."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import drilled_run
from benchmarks.drilled_run import Start
from tests import hosts
from tests.hosts import Host
from tests.programs import Program, started, torchrun


class Launcher:
    """A program with those methods of Popen that a drill uses."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.pid, self.poll, self.send_signal = program.pid, program.poll, program.send_signal
        self.ranks = program.ranks

    def wait(self, timeout_s: float | None = None) -> int:
        if (code := self._program.join(timeout_s)) is None:
            raise subprocess.TimeoutExpired("torchrun", timeout_s or 0.0)
        return code

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forked:
    """Replaces `drilled_run.torchrun` and `drilled_run.on_hosts`, with the same signatures."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._launchers: list[Launcher] = []

    def torchrun(self, processes: int, *options: str) -> Start:
        def start(overrides: Sequence[str], environment: dict[str, str], folder: Path) -> list[Any]:
            command = [*torchrun(processes, "--max-restarts=1", *options), *overrides]
            return [self._start(command, environment, folder / "output")]

        return start

    def on_hosts(self, members: Sequence[Host], per_host: int, *options: str, conf: str = "") -> Start:
        def start(overrides: Sequence[str], environment: dict[str, str], folder: Path) -> list[Any]:
            for host in members:
                host.link_up()
            launchers = []
            for index, host in enumerate(members):
                command = hosts.torchrun(members, index, per_host, conf)[1:]
                command += [
                    *options,
                    "--run-path",
                    "--start-method=fork",
                    str(drilled_run.PROGRAM),
                    *overrides,
                ]
                variables = {**environment, "GLOO_SOCKET_IFNAME": host.interface}
                launchers.append(self._start(command, variables, folder / f"output{index}", host))
            return launchers

        return start

    def _start(
        self, command: Sequence[str], environment: dict[str, str], output: Path, host: int | Host = 0
    ) -> Launcher:
        program = self._stack.enter_context(started(*command, env=environment, host=host, output=output))
        self._launchers.append(Launcher(program))
        return self._launchers[-1]

    def ranks(self, mark: str) -> dict[int, int]:
        """Replaces `drilled_run.ranks_of`, which cannot see the environment of forked processes."""
        return {pid: 0 for launcher in self._launchers for pid in launcher.ranks()}
