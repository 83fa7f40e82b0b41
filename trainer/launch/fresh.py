"""Start this program anew, in a process and session of its own that does not outlive who started it."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.launch.place import TELLING

_PARENT, _LAUNCHER = "RINGMASTER_PARENT", "RINGMASTER_LAUNCHER"
_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
_ROOT = Path(__file__).resolve().parents[2]


def start(
    argv: Sequence[str],
    *,
    devices: Sequence[str] | None = None,
    launcher: str | None = None,
    environment: Mapping[str, str] | None = None,
    **popen: Any,
) -> subprocess.Popen[Any]:
    """Start a run with this command line; its exit status is the run's own (0, 1, 2, 3, 75: see README).

    The process leads a session, so that a Ctrl-C at the terminal does not reach it: whoever starts it passes
    the signal on. It is killed when the *thread* that called this ends, so call from one that stays. What a
    launcher around this process told it about its place is not passed on.

    Args:
        argv: overrides, and options of Hydra's; `run_dir=D launch=local launch.processes=2` for instance.
        devices: the GPUs that it may see, as in CUDA_VISIBLE_DEVICES; None: all that this process sees.
        launcher: who starts ranks, which are then not to launch any themselves.
        environment: added to this process's.
        popen: for subprocess.Popen (stdout, cwd, ...).
    """
    variables = {name: value for name, value in os.environ.items() if not TELLING.match(name)}
    variables |= {_PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1", **(environment or {})}
    if devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if launcher is not None:
        variables[_LAUNCHER] = launcher
    return subprocess.Popen(
        [*_program(), *argv], env=variables, stdin=subprocess.DEVNULL, start_new_session=True, **popen
    )


def launched_by() -> str | None:
    """The launcher of ours that started this process as one rank of a run."""
    return os.environ.get(_LAUNCHER)


def die_with_parent() -> None:
    """Leave nothing running when whoever called `start` is gone, however it went (Linux only)."""
    parent = os.environ.pop(_PARENT, None)
    if parent is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # it went before we asked
            os._exit(1)


def _program() -> list[str]:
    """This program, in its source tree or where it is installed, whatever the current directory holds."""
    script = _ROOT / "train.py"
    return [sys.executable, str(script)] if script.exists() else [sys.executable, "-P", "-m", "ringmaster"]
