"""Starts this program in a new process and session, which ends with the process that started it."""

import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.launch.rank_info import TELLING, RankInfo
from trainer.launch.signals import signal_at_parents_death

_PARENT, _LAUNCHER, _PATH = "RINGMASTER_PARENT", "RINGMASTER_LAUNCHER", "RINGMASTER_PATH"
_ROOT = Path(__file__).resolve().parents[2]
_own_script: list[str] = []  # the user's script, or -m and a module, once it has called main


def start(
    argv: Sequence[str],
    *,
    module: str | None = None,
    devices: Sequence[str] | None = None,
    launcher: str | None = None,
    environment: Mapping[str, object] | None = None,
    **popen: Any,
) -> subprocess.Popen[Any]:
    """Start a run with this command line; its exit status is the run's own (docs/reference/exit-codes.md).

    The process leads a session, so a Ctrl-C at the terminal does not reach it: the caller passes the signal
    on. It is killed when the *thread* that called this ends, so call it from one that stays. Variables in
    which a launcher told this process its rank are removed.

    Args:
        argv: overrides, and options of Hydra's; `run_dir=D launch=local launch.processes=2` for instance.
        module: run this module in place of train.py, as in python -m trainer.evaluate.
        devices: the GPUs that it may see, as in CUDA_VISIBLE_DEVICES; None: all that this process sees.
        launcher: the launcher that starts the ranks, which then launch none themselves.
        environment: variables added to this process's.
        popen: for subprocess.Popen (stdout, cwd, ...).
    """
    variables = {name: value for name, value in os.environ.items() if not TELLING.match(name)}
    variables |= {_PARENT: str(os.getpid()), **variables_for_ranks(launcher)}
    variables |= {name: str(value) for name, value in (environment or {}).items()}
    if devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    command = program()
    if module is not None:  # -P: no folder of the user hides one of this project's packages
        command = [sys.executable, "-P", "-m", module]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    popen = {"stdin": subprocess.DEVNULL, **popen}
    return subprocess.Popen([*command, *argv], env=variables, start_new_session=True, **popen)


def variables_for_ranks(launcher: str | None) -> dict[str, str]:
    """The variables that tell a process who started it, and where the user's classes are."""
    variables = {_PATH: os.pathsep.join(_own_folders()), "PYTHONUNBUFFERED": "1"}
    return variables if launcher is None else variables | {_LAUNCHER: launcher}


def launched_by() -> str | None:
    """The launcher of this project that started this process as a rank of a run."""
    return os.environ.get(_LAUNCHER)


def is_watched(here: RankInfo) -> bool:
    """Whether a launcher on this host waits for this process, which must end with it (StopRequest)."""
    return launched_by() == "local" or here.under_torchrun


def die_with_parent() -> None:
    """End this process when the one that called `start` ends, for any reason."""
    parent = os.environ.pop(_PARENT, None)
    if parent is not None:
        signal_at_parents_death()
        if os.getppid() != int(parent):  # it ended before the call above
            os._exit(1)


def take_limits() -> None:
    """Let this process and its children open as many files as they may: each further rank takes some."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = most if sys.platform == "linux" else min(most, 4096)  # a Mac refuses the limit that it tells
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))


def extend_path() -> None:
    """Find `_target_`s beside the user's program: in the current directory, or where `start`'s caller does.

    The packages `trainer` and `models` are imported already, so no folder of that name hides them.
    """
    given = os.environ.get(_PATH)
    folders = [str(Path.cwd())] if given is None else given.split(os.pathsep)
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


def _own_folders() -> list[str]:
    """The folders that a user added to sys.path: all but Python's own and this project's."""
    installed = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    folders = [str(Path(folder).resolve()) for folder in (*sys.path, ".")]
    return [
        folder
        for folder in dict.fromkeys(folders)
        if folder != str(_ROOT) and not folder.startswith(installed)
    ]


def take_script() -> None:
    """Have `program` start this script or module, which may register resolvers before it calls main."""
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if file and (script := Path(file).resolve()) == Path(sys.argv[0]).resolve():
        _own_script[:] = ["-m", spec.name.removesuffix(".__main__")] if spec else [str(script)]


def program() -> list[str]:
    """The command of this program in any current directory: the script that called main, or else ours."""
    if _own_script:
        return [sys.executable, *_own_script]
    script = _ROOT / "train.py"
    return [sys.executable, str(script)] if script.exists() else [sys.executable, "-P", "-m", "ringmaster"]


def num_gpus() -> int:
    """How many GPUs torch sees. Asked only if there is a driver, since importing torch takes seconds."""
    if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd"))):
        return 0
    import torch

    return torch.accelerator.device_count()
