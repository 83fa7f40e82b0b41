"""Start this program in a new process and session, which end when the process that started them ends."""

import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.launch.rank_info import RANK_VARIABLES, RankInfo
from trainer.launch.signals import signal_at_parents_death

_PARENT, _LAUNCHER, PATH = "RINGMASTER_PARENT", "RINGMASTER_LAUNCHER", "RINGMASTER_PATH"
_ROOT = Path(__file__).resolve().parents[2]
_user_script: list[str] = []  # the user's script, or -m and a module, once it has called main


def start(
    argv: Sequence[str],
    *,
    module: str | None = None,
    python: str = sys.executable,
    devices: Sequence[str] | None = None,
    launcher: str | None = None,
    environment: Mapping[str, object] | None = None,
    **popen: Any,
) -> subprocess.Popen[Any]:
    """Start a run with this command line. See docs/reference/exit-codes.md for its exit status.

    The process leads a session, so a Ctrl-C at the terminal does not reach it: the caller must forward the
    signal. The process is killed when the *thread* that called this function ends, so that thread must
    outlive it. Variables by which a launcher set the rank of this process are removed.

    Args:
        argv: overrides and Hydra options, such as `run_dir=D launch=local launch.processes=2`.
        module: a module to run instead of train.py, as in python -m trainer.evaluate.
        python: the interpreter that runs `module`.
        devices: the GPUs for CUDA_VISIBLE_DEVICES; None: all GPUs that are visible to this process.
        launcher: the name of the launcher that starts ranks; the ranks then do not launch anything
            themselves.
        environment: additional environment variables.
        popen: arguments of subprocess.Popen (stdout, cwd, ...).
    """
    variables = {name: value for name, value in os.environ.items() if not RANK_VARIABLES.match(name)}
    variables |= {_PARENT: str(os.getpid()), **variables_for_ranks(launcher)}
    variables |= {name: str(value) for name, value in (environment or {}).items()}
    if devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    command = program()
    if module is not None:  # -P: a folder of the user must not hide one of this project's packages
        command = [python, "-P", "-m", module]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    popen = {"stdin": subprocess.DEVNULL, **popen}
    return subprocess.Popen([*command, *argv], env=variables, start_new_session=True, **popen)


def variables_for_ranks(launcher: str | None) -> dict[str, str]:
    """Return environment variables with the launcher's name and the import path for the user's classes."""
    variables = {PATH: os.pathsep.join(_user_folders()), "PYTHONUNBUFFERED": "1"}
    return variables if launcher is None else variables | {_LAUNCHER: launcher}


def launched_by() -> str | None:
    """Return the launcher of this project that started this process as a rank, if any."""
    return os.environ.get(_LAUNCHER)


def has_launcher_on_host(own: RankInfo) -> bool:
    """Return whether a launcher on this host waits for this process, which must not outlive it."""
    return launched_by() == "local" or own.under_torchrun


def die_with_parent() -> None:
    """End this process when the process that called `start` ends, for any reason."""
    parent = os.environ.pop(_PARENT, None)
    if parent is not None:
        signal_at_parents_death()
        if os.getppid() != int(parent):  # the parent ended before the call above
            os._exit(1)


def raise_file_limit() -> None:
    """Raise the limit of open files to its maximum, because a run opens more files with more ranks."""
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = maximum if sys.platform == "linux" else min(maximum, 4096)  # macOS rejects its own maximum
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, maximum))


def extend_path() -> None:
    """Make each `_target_` importable from the current directory, or the folders that `start` passed on."""
    given = os.environ.get(PATH)
    folders = [str(Path.cwd())] if given is None else given.split(os.pathsep)
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


def _user_folders() -> list[str]:
    installed = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    folders = [str(Path(folder).resolve()) for folder in (*sys.path, ".")]
    return [
        folder
        for folder in dict.fromkeys(folders)
        if folder != str(_ROOT) and not folder.startswith(installed)
    ]


def remember_script() -> None:
    """Make `program` return the user's script or module, which may register OmegaConf resolvers."""
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if file and (script := Path(file).resolve()) == Path(sys.argv[0]).resolve():
        _user_script[:] = ["-m", spec.name.removesuffix(".__main__")] if spec else [str(script)]


def program() -> list[str]:
    """Return the command that starts this program from any directory: the user's script or train.py."""
    if _user_script:
        return [sys.executable, *_user_script]
    script = _ROOT / "train.py"
    return [sys.executable, str(script)] if script.exists() else [sys.executable, "-P", "-m", "ringmaster"]


def num_gpus() -> int:
    """Return the number of GPUs that torch sees. Import torch, which takes seconds, only with a driver."""
    if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd"))):
        return 0
    import torch

    return torch.accelerator.device_count()
