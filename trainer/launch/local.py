"""launch=local: starts the processes of a run here and watches them until the last one has ended.

This file does not import torch: the launcher starts fast, and each rank is a fresh interpreter, so a program
that has used CUDA can launch too.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from trainer.config import Config, LocalLaunchConfig
from trainer.config.overrides import set_to
from trainer.errors import NonFiniteError, StoppedBySignal, UserError
from trainer.files.new_directory import new_run_dir
from trainer.files.untrusted import load_json, printable
from trainer.launch import fresh
from trainer.launch.place import LISTENING, place
from trainer.launch.signals import stop_signals_to

# How long the other ranks may take to report, or to finish a save, after one has failed.
_GRACE_S = 30.0
_POLL_S = 0.05
_OF_A_FAULT = ("status", "kind", "rank", "phase", "step", "where")
_MISTAKE, _NOT_FINITE, _STOPPED = (e.exit_code for e in (UserError, NonFiniteError, StoppedBySignal))


def launch(config: Config, argv: Sequence[str]) -> int:
    """Run `argv` in `launch.processes` processes on this host; return the exit status of the run.

    After a fault, up to `launch.max_restarts` further attempts start from the newest checkpoint. A UserError,
    a loss that is not finite and a stop are final, and so is the same fault at the same step again.

    Raises:
        UserError: this process is one of several itself.
    """
    settings, processes = config.launch, _processes(config)
    assert isinstance(settings, LocalLaunchConfig)
    run_dir = config.run_dir or str(new_run_dir())
    argv = [*argv, set_to("run_dir", run_dir)]
    seen: list[dict[str, Any]] = []
    for attempt in range(settings.max_restarts + 1):
        # The given resume holds until the run has saved.
        is_told = config.resume is not None and not any(Path(run_dir, "checkpoints").glob("step_*"))
        # resume=auto also before the first save, since the directory is used now.
        again = ["resume=auto"] if attempt and not is_told else []
        status, stopped = _attempt([*argv, *again], processes)
        if status in (0, _MISTAKE, _NOT_FINITE, _STOPPED) or stopped or attempt == settings.max_restarts:
            break
        message, fault = _fault(Path(run_dir))
        if fault and fault in seen:
            _say(f"no restart: the same fault at the same step again ({message})")
            break
        seen.append(fault)
        with contextlib.suppress(OSError):
            Path(run_dir, "failure.json").unlink(missing_ok=True)  # a rank that is killed writes none
        _say(f"restart {attempt + 1} of {settings.max_restarts}, from the newest checkpoint")
    return status


def launch_module(config: Config, module: str, argv: Sequence[str]) -> int:
    """Run `python -m MODULE ARGV` in `launch.processes` processes on this host; return its exit status.

    Raises:
        UserError: this process is one of several itself.
    """
    return _attempt(argv, _processes(config), module)[0]


def _processes(config: Config) -> int:
    assert isinstance(config.launch, LocalLaunchConfig)
    if place().among_ranks:
        raise UserError(
            f"launch=local inside {place().launcher or 'ranks'} would start {place().world_size} runs; "
            "use only one of the two"
        )
    return config.launch.processes or _gpus(config) or 1


def _attempt(argv: Sequence[str], processes: int, module: str | None = None) -> tuple[int, bool]:
    """Start the ranks and wait for them; return their status, and whether a signal stopped them."""
    ranks: list[subprocess.Popen[bytes]] = []
    printers: list[threading.Thread] = []
    received: list[int] = []
    try:
        with stop_signals_to(partial(_forward_to, ranks, received)):
            # A socket that already listens avoids a race for a free port: rank 0 inherits it.
            with socket.create_server(("127.0.0.1", 0)) as server:
                for rank in range(processes):
                    ranks.append(_start(argv, rank, processes, server, module))
                    printers += _printers(ranks[rank], rank)
            _wait(ranks)
    finally:
        codes = [process.poll() for process in ranks]
        for process in ranks:
            process.kill()
            process.wait()
        for printer in printers:
            printer.join(1)
    return _status(codes, received), bool(received)


def _start(
    argv: Sequence[str], rank: int, processes: int, server: socket.socket, module: str | None
) -> subprocess.Popen[bytes]:
    told: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
    told |= {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.getsockname()[1]}
    told |= {LISTENING: server.fileno()} if rank == 0 else {}
    pipe = None if rank == 0 and _is_inherited() else subprocess.PIPE
    return fresh.start(
        argv,
        module=module,
        launcher="local",
        environment={name: str(value) for name, value in told.items()},
        pass_fds=[server.fileno()] if rank == 0 else [],
        stdout=pipe,
        stderr=pipe,
    )


def _printers(process: subprocess.Popen[bytes], rank: int) -> list[threading.Thread]:
    streams = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    printers = [
        threading.Thread(target=_print, args=(pipe, out, rank), daemon=True) for pipe, out in streams if pipe
    ]
    for printer in printers:
        printer.start()
    return printers


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Return when all have ended, or after the grace period that follows the first failure."""
    deadline = float("inf")
    while None in (codes := [process.poll() for process in ranks]) and time.monotonic() < deadline:
        if deadline == float("inf") and any(codes):
            has_told = codes[0] in (_MISTAKE, _NOT_FINITE)  # the others would report the same
            deadline = time.monotonic() + (0 if has_told else _GRACE_S)
        time.sleep(_POLL_S)


def _status(codes: Sequence[int | None], received: Sequence[int]) -> int:
    """The launcher's exit status. Names the ranks that could not report their end themselves."""
    for rank, code in enumerate(codes):
        if code is None and codes[0] not in (_MISTAKE, _NOT_FINITE):
            _say(f"rank {rank} was still running {_GRACE_S:.0f} s after the others had ended, and was killed")
        elif code is not None and code < 0:
            hint = ": out of memory, or kill -9" if code == -signal.SIGKILL else ""
            _say(f"rank {rank} was ended by {signal.Signals(-code).name}{hint}")
    bad = {code for code in codes if code}
    for final in (_MISTAKE, _NOT_FINITE):
        if final in bad:
            return final
    if not bad or bad == {_STOPPED}:
        return max(bad, default=0)
    return 128 + received[0] if received and all(code < 0 for code in bad) else 1


def _forward_to(ranks: Sequence[subprocess.Popen[bytes]], received: list[int], number: int) -> None:
    """Pass a signal on to the ranks, always as SIGTERM, and record it.

    An interpreter that is still importing answers SIGINT with a traceback.
    """
    received.append(number)
    for process in ranks:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)


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


def _fault(run_dir: Path) -> tuple[str, dict[str, Any]]:
    """The message of the fault that ended the last attempt, if it was recorded, and the fields by which the
    same fault is recognized. Messages differ: they contain pids and seconds."""
    try:
        found = load_json(run_dir / "failure.json")
        return printable(found["message"]), {name: found.get(name) for name in _OF_A_FAULT}
    except (OSError, UserError, KeyError):
        return "", {}


def _gpus(config: Config) -> int:
    """How many GPUs torch sees. Asked only if there is a driver, since it takes importing torch."""
    if config.distributed.device == "cpu" or not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd"))):
        return 0
    import torch

    return torch.cuda.device_count()


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
