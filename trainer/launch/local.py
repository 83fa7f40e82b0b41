"""launch=local: start the processes of a run on this host and wait until all processes have ended.

The module does not import torch, so that the launcher starts fast. Each rank is a new interpreter, so a
program that has used CUDA can launch a run, too.
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
from trainer.errors import NonFiniteError, StoppedBySignal, UserError, WrongResultError
from trainer.files import failure_file
from trainer.files.writing import new_run_dir
from trainer.launch import new_process
from trainer.launch.exits import PAUSES_S
from trainer.launch.rank_info import STORE_FD, rank_info
from trainer.launch.signals import stop_signals_to

_GRACE_S = 30.0  # time for the other ranks to report or finish a save after a rank has failed
_POLL_S = 0.05
_RESTARTED = (1, WrongResultError.exit_code)
_SHARED = (
    UserError.exit_code,
    NonFiniteError.exit_code,
    WrongResultError.exit_code,
)  # statuses that rank 0 reports for all ranks


def launch(config: Config, argv: Sequence[str], module: str | None = None) -> tuple[int, str | None]:
    """Run `argv` in `launch.processes` processes on this host.

    After a failure, up to `launch.max_restarts` more attempts start from the newest checkpoint (after a wrong
    result, from the newest verified one), each after a pause. There is no further attempt after a UserError,
    a non-finite loss or a stop by a signal.

    Args:
        module: a module to run once instead of train.py, as in python -m trainer.evaluate.

    Returns:
        The exit status of the run, and the message with which it ended, if known.

    Raises:
        UserError: this process is itself one of several ranks.
    """
    assert isinstance(config.launch, LocalLaunchConfig)
    if rank_info().among_ranks:
        raise UserError(
            f"launch=local under {rank_info().launcher or 'a process that is already a rank'} would start "
            f"{rank_info().world_size} separate runs; use one of the two launchers"
        )
    num_gpus = new_process.num_gpus() if config.distributed.device != "cpu" else 0
    per_gpu = config.distributed.ranks_per_gpu
    processes = config.launch.processes or num_gpus * (1 if per_gpu == "auto" else int(per_gpu)) or 1
    if module is not None:
        return _attempt(processes, argv, module=module)
    run_dir = Path(config.run_dir or new_run_dir())
    argv = [*argv, set_to("run_dir", str(run_dir))]
    max_restarts = config.launch.max_restarts
    for attempt in range(max_restarts + 1):
        # Until the run has saved a checkpoint, keep the user's resume.
        keeps_resume = config.resume is not None and not any((run_dir / "checkpoints").glob("step_*"))
        resume = ["resume=auto"] if attempt and not keeps_resume else []
        status, message = _attempt(processes, [*argv, *resume], config.distributed.shrink)
        if status not in _RESTARTED or attempt == max_restarts:
            break
        pause_s = PAUSES_S[min(attempt, len(PAUSES_S) - 1)]
        print(
            f"attempt {attempt + 1} of {max_restarts + 1} failed; restart {attempt + 1} of {max_restarts}, "
            f"from the newest valid checkpoint, in {pause_s} s",
            file=sys.stderr,
        )
        time.sleep(pause_s)
    return status, message


def _attempt(
    processes: int, argv: Sequence[str], shrinks: bool = False, module: str | None = None
) -> tuple[int, str | None]:
    """Start the ranks and wait until they end; return what `launch` returns.

    Args:
        shrinks: whether the remaining ranks continue when a signal kills a rank.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    printers: list[threading.Thread] = []
    received: list[int] = []

    def forward(number: int) -> None:
        received.append(number)
        for process in ranks:
            if process.poll() is None:  # not SIGINT: during imports, Python answers it with a traceback
                process.send_signal(signal.SIGTERM)

    try:
        # Rank 0 inherits a listening socket, which avoids a race for a free port.
        with (
            stop_signals_to(forward),
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
                        printers.append(threading.Thread(target=_copy, args=(pipe, out, rank), daemon=True))
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
        {} if rank else {STORE_FD: server.fileno()}
    )
    # A notebook replaces sys.stdout, so the output of rank 0 must be copied to it.
    pipe = None if rank == 0 and sys.stdout is sys.__stdout__ else subprocess.PIPE
    streams: dict[str, Any] = {"stdout": pipe, "stderr": pipe, "pass_fds": [] if rank else [server.fileno()]}
    return new_process.start(argv, module=module, launcher="local", environment=variables, **streams)


def _copy(pipe: IO[bytes], out: IO[str], rank: int) -> None:
    prefix = f"[rank {rank}] " if rank else ""
    for line in pipe:
        text = line.decode(errors="replace")
        with contextlib.suppress(OSError):  # continue without a reader: a full pipe would block the rank
            out.write(text if text.startswith(prefix) else prefix + text)
            out.flush()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], shrinks: bool) -> list[int | None]:
    """Return all exit codes. After a failure, wait only for the grace period (None: still running)."""
    deadline = float("inf")
    while None in (codes := [process.poll() for process in ranks]) and time.monotonic() < deadline:
        if deadline == float("inf") and any(code and (code > 0 or not shrinks) for code in codes):
            deadline = time.monotonic() + (0 if codes[0] in _SHARED else _GRACE_S)
        time.sleep(_POLL_S)
    return codes


def _status(codes: Sequence[int | None], received: Sequence[int], shrinks: bool) -> int:
    """Return the exit status of the run, and print the ranks that could not report how they ended."""
    for rank, code in enumerate(codes):
        if code is None and codes[0] not in _SHARED:
            after = f"{_GRACE_S:.0f} s after the other ranks had ended"
            print(f"rank {rank} was still running {after}, and was killed", file=sys.stderr)
        elif code is not None and code < 0:
            hint = ""
            if code == -signal.SIGKILL and codes[0] not in _SHARED:
                hint = ": out of memory, or kill -9"
                if 1 in codes:
                    hint += f", or killed by rank {codes.index(1)} because it was stuck"
            print(f"rank {rank} was killed by {signal.Signals(-code).name}{hint}", file=sys.stderr)
        elif code not in (None, 0, 1, *_SHARED, StoppedBySignal.exit_code):
            print(f"rank {rank} exited with the unexpected status {code}", file=sys.stderr)
    failed = {code for code in codes if code}
    if shrinks and any(code is not None and code >= 0 for code in codes):
        failed = {code for code in failed if code > 0}  # the run continued without the killed ranks
    final = [status for status in _SHARED if status in failed]
    if final or failed <= {StoppedBySignal.exit_code}:
        return min(final or failed, default=0)
    return 128 + received[0] if received else 1
