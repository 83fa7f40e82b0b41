"""launch=local: starts the processes of a run here and watches them until the last one has ended.

This file does not import torch: the launcher starts fast, and each rank is a fresh interpreter, so a program
that has used CUDA can launch too.
"""

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from trainer.config import Config, LocalLaunchConfig
from trainer.config.overrides import set_to
from trainer.errors import NonFiniteError, StoppedBySignal, UserError
from trainer.files import failure_file
from trainer.files.writing import new_run_dir
from trainer.launch import fresh
from trainer.launch.exits import PAUSES_S
from trainer.launch.rank_info import LISTENING, rank_info
from trainer.launch.signals import stop_signals_to

_GRACE_S = 30.0  # for the other ranks, after one has failed: to report, or to finish a save
_POLL_S = 0.05
_TOLD = (UserError.exit_code, NonFiniteError.exit_code)  # what rank 0 tells for all


def launch(config: Config, argv: Sequence[str], module: str | None = None) -> tuple[int, str | None]:
    """Run `argv` in `launch.processes` processes on this host; return its status, and why it ended if known.

    After a fault, up to `launch.max_restarts` further attempts start from the newest checkpoint, each after
    a pause. A UserError, a loss that is not finite, and a stop are final.

    Args:
        module: run this module once in place of train.py, as in python -m trainer.evaluate.

    Raises:
        UserError: this process is one of several itself.
    """
    assert isinstance(config.launch, LocalLaunchConfig)
    if rank_info().among_ranks:
        raise UserError(
            f"launch=local inside {rank_info().launcher or 'ranks'} would start "
            f"{rank_info().world_size} runs; use only one of the two"
        )
    on_gpus = config.distributed.device != "cpu"
    processes = config.launch.processes or (fresh.num_gpus() if on_gpus else 0) or 1
    if module is not None:
        return _attempt(processes, argv, module=module)
    run_dir = Path(config.run_dir or new_run_dir())
    argv = [*argv, set_to("run_dir", str(run_dir))]
    max_restarts = config.launch.max_restarts
    for attempt in range(max_restarts + 1):
        # The given resume holds until the run has saved; auto also before, since the directory is used now.
        is_told = config.resume is not None and not any((run_dir / "checkpoints").glob("step_*"))
        again = ["resume=auto"] if attempt and not is_told else []
        status, message = _attempt(processes, [*argv, *again], config.distributed.shrink)
        if status != 1 or attempt == max_restarts:
            break
        pause_s = PAUSES_S[min(attempt, len(PAUSES_S) - 1)]
        print(
            f"that was try {attempt + 1} of {max_restarts + 1}; restart {attempt + 1} of {max_restarts} from "
            f"the newest checkpoint in {pause_s} s",
            file=sys.stderr,
        )
        time.sleep(pause_s)
    return status, message


def _attempt(
    processes: int, argv: Sequence[str], shrinks: bool = False, module: str | None = None
) -> tuple[int, str | None]:
    """Start the ranks and wait for their end; return what `launch` does.

    Args:
        shrinks: whether the others go on when some are ended by a signal.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    printers: list[threading.Thread] = []
    received: list[int] = []

    def pass_on(number: int) -> None:
        received.append(number)
        for process in ranks:
            if process.poll() is None:  # an interpreter that still imports answers SIGINT with a traceback
                process.send_signal(signal.SIGTERM)

    try:
        # A socket that already listens avoids a race for a free port: rank 0 inherits it.
        with (
            stop_signals_to(pass_on),
            tempfile.TemporaryDirectory() as folder,
            socket.create_server(("127.0.0.1", 0)) as server,
        ):
            address, port = server.getsockname()
            variables = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": address}
            variables |= {"MASTER_PORT": port, failure_file.END_FILE: f"{folder}/{failure_file.NAME}"}
            for rank in range(processes):
                ranks.append(_start(rank, server, argv, module, variables))
                for pipe, out in ((ranks[-1].stdout, sys.stdout), (ranks[-1].stderr, sys.stderr)):
                    if pipe:
                        printers.append(threading.Thread(target=_print, args=(pipe, out, rank), daemon=True))
                        printers[-1].start()
            server.close()
            codes = _wait(ranks, shrinks)
            last_end = failure_file.read(Path(folder)) or {}
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        for printer in printers:
            printer.join(1)
    return _status(codes, received, shrinks), last_end.get("message")


def _start(
    rank: int, server: socket.socket, argv: Sequence[str], module: str | None, variables: Mapping[str, object]
) -> subprocess.Popen[bytes]:
    variables = {**variables, "RANK": rank, "LOCAL_RANK": rank} | (
        {} if rank else {LISTENING: server.fileno()}
    )
    pipe = None if rank == 0 and sys.stdout is sys.__stdout__ else subprocess.PIPE  # None not in a notebook
    streams: dict[str, Any] = {"stdout": pipe, "stderr": pipe, "pass_fds": [] if rank else [server.fileno()]}
    return fresh.start(argv, module=module, launcher="local", environment=variables, **streams)


def _print(pipe: IO[bytes], out: IO[str], rank: int) -> None:
    prefix = f"[rank {rank}] " if rank else ""
    for line in pipe:
        text = line.decode(errors="replace")
        with contextlib.suppress(OSError):  # without a reader go on: a full pipe would stop the rank
            out.write(text if text.startswith(prefix) else prefix + text)
            out.flush()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], shrinks: bool) -> list[int | None]:
    """Wait for all, or for the grace period after the first failure; return the exit codes, None: it runs."""
    deadline = float("inf")
    while None in (codes := [process.poll() for process in ranks]) and time.monotonic() < deadline:
        if deadline == float("inf") and any(code and (code > 0 or not shrinks) for code in codes):
            deadline = time.monotonic() + (0 if codes[0] in _TOLD else _GRACE_S)
        time.sleep(_POLL_S)
    return codes


def _status(codes: Sequence[int | None], received: Sequence[int], shrinks: bool) -> int:
    """The exit status of the run. Names the ranks that could not report their end themselves."""
    for rank, code in enumerate(codes):
        if code is None and codes[0] not in _TOLD:
            after = f"{_GRACE_S:.0f} s after the others had ended"
            print(f"rank {rank} was still running {after}, and was killed", file=sys.stderr)
        elif code is not None and code < 0:
            hint = ""
            if code == -signal.SIGKILL and codes[0] not in _TOLD:
                hint = ": out of memory, or kill -9"
                if 1 in codes:
                    hint += f", or rank {codes.index(1)}, if its verdict is that this one is stuck"
            print(f"rank {rank} was ended by {signal.Signals(-code).name}{hint}", file=sys.stderr)
        elif code not in (None, 0, 1, *_TOLD, StoppedBySignal.exit_code):
            print(f"rank {rank} ended with status {code}, which is none of this program's", file=sys.stderr)
    bad = {code for code in codes if code}
    if shrinks and any(code is not None and code >= 0 for code in codes):
        bad = {code for code in bad if code > 0}  # the others have gone on without those that a signal ended
    final = [status for status in _TOLD if status in bad]
    if final or bad <= {StoppedBySignal.exit_code}:
        return min(final or bad, default=0)
    return 128 + received[0] if received else 1
