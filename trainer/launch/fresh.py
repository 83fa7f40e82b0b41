"""Start this program anew, in a process and session of its own that does not outlive who started it."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.launch.place import TELLING, Place

_PARENT, _LAUNCHER, _PATH = "RINGMASTER_PARENT", "RINGMASTER_LAUNCHER", "RINGMASTER_PATH"
_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
_ROOT = Path(__file__).resolve().parents[2]


def start(
    argv: Sequence[str],
    *,
    module: str | None = None,
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
        module: another program than train.py, as in python -m trainer.evaluate.
        devices: the GPUs that it may see, as in CUDA_VISIBLE_DEVICES; None: all that this process sees.
        launcher: who starts ranks, which are then not to launch any themselves.
        environment: added to this process's.
        popen: for subprocess.Popen (stdout, cwd, ...).
    """
    variables = {name: value for name, value in os.environ.items() if not TELLING.match(name)}
    variables |= {_PARENT: str(os.getpid()), **told_to_ranks(launcher), **(environment or {})}
    if devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    command = program()
    if module is not None:  # -P: no folder of the user's takes the place of a package of ours
        command = [sys.executable, "-P", "-m", module]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [*command, *argv], env=variables, stdin=subprocess.DEVNULL, start_new_session=True, **popen
    )


def told_to_ranks(launcher: str | None) -> dict[str, str]:
    """The variables by which a process knows who started it, and where its user's classes are."""
    told = {_PATH: os.pathsep.join(_own_folders()), "PYTHONUNBUFFERED": "1"}
    return told if launcher is None else told | {_LAUNCHER: launcher}


def launched_by() -> str | None:
    """The launcher of ours that started this process as one rank of a run."""
    return os.environ.get(_LAUNCHER)


def is_watched(here: Place) -> bool:
    """Whether a launcher on this host waits for this process, which must not outlive it (StopRequest)."""
    return launched_by() == "local" or here.under_torchrun


def die_with_parent() -> None:
    """Leave nothing running when whoever called `start` is gone, however it went (Linux only)."""
    parent = os.environ.pop(_PARENT, None)
    if parent is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # it went before we asked
            os._exit(1)


def extend_path() -> None:
    """Let `_target_`s be found beside the user's program: in the current directory, or where who called
    `start` would have found them.

    The packages `trainer` and `models` are loaded by now, so that no folder of that name takes their place.
    """
    told = os.environ.get(_PATH)
    folders = [str(Path.cwd())] if told is None else told.split(os.pathsep)
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


def _own_folders() -> list[str]:
    """What a user has added to sys.path: all but Python's own, and this project."""
    installed = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    folders = [str(Path(folder).resolve()) for folder in (*sys.path, ".")]
    return [
        folder
        for folder in dict.fromkeys(folders)
        if folder != str(_ROOT) and not folder.startswith(installed)
    ]


def program() -> list[str]:
    """This program, in its source tree or where it is installed, whatever the current directory holds."""
    script = _ROOT / "train.py"
    return [sys.executable, str(script)] if script.exists() else [sys.executable, "-P", "-m", "ringmaster"]
