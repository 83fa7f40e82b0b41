"""launch=local: starts the processes of a run here and watches them until the last one has ended.

This file does not import torch: the launcher starts fast, and each rank is a fresh interpreter, so a program
that has used CUDA can launch too.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config import Config, LocalLaunchConfig
from trainer.config.overrides import set_to
from trainer.errors import NonFiniteError, StoppedBySignal, UserError
from trainer.files.new_directory import new_run_dir
from trainer.files.untrusted import load_json, printable
from trainer.launch.local_ranks import LocalRanks
from trainer.launch.place import place
from trainer.launch.signals import stop_signals_to

# How long the other ranks may take to report, or to finish a save, after one has failed.
_GRACE_S = 30.0
_POLL_S, _LOOK_S = 0.05, 1.0
_OF_A_FAULT = ("status", "kind", "rank", "phase", "step", "where")
_MISTAKE, _NOT_FINITE, _STOPPED = (e.exit_code for e in (UserError, NonFiniteError, StoppedBySignal))


def launch(config: Config, argv: Sequence[str]) -> int:
    """Run `argv` in `launch.processes` processes on this host; return the exit status of the run.

    After a fault, up to `launch.max_restarts` further attempts start from the newest checkpoint. A UserError,
    a loss that is not finite, a stop, and the same fault at the same step again are final.

    Raises:
        UserError: this process is one of several itself; or `launch` asks for standbys without restarts.
    """
    settings, processes = config.launch, _processes(config)
    assert isinstance(settings, LocalLaunchConfig)
    standbys = _standbys(settings, processes)
    run_dir = config.run_dir or str(new_run_dir())
    argv = [*argv, set_to("run_dir", run_dir)]
    seen: list[dict[str, Any]] = []
    following = LocalRanks(processes)
    try:
        for attempt in range(settings.max_restarts + 1):
            ranks, following = following, LocalRanks(processes)
            # The given resume holds until the run has saved.
            is_told = config.resume is not None and not any(Path(run_dir, "checkpoints").glob("step_*"))
            # resume=auto also before the first save, since the directory is used now.
            again = ["resume=auto"] if attempt and not is_told else []
            is_last = attempt == settings.max_restarts
            starter = _StandbyStarter(following, 0 if is_last else standbys, Path(run_dir, "train.log"))
            status, stopped = _attempt(ranks, [*argv, *again], starter.look)
            if status in (0, _MISTAKE, _NOT_FINITE, _STOPPED) or stopped or is_last:
                break
            message, fault = _fault(Path(run_dir))
            if fault and fault in seen:
                _say(f"no restart: the same fault at the same step again ({message})")
                break
            seen.append(fault)
            with contextlib.suppress(OSError):
                Path(run_dir, "failure.json").unlink(missing_ok=True)  # a rank that is killed writes none
            _say(f"restart {attempt + 1} of {settings.max_restarts}, from the newest checkpoint")
    finally:
        following.end()
    return status


class _StandbyStarter:
    """Starts the standbys of the following attempt once this one has logged a step.

    Their imports would delay its own, and they are of no use to a run that never makes a step.
    """

    def __init__(self, following: LocalRanks, standbys: int, log: Path) -> None:
        self._following, self._standbys, self._log = following, standbys, log
        self._begin = log.stat().st_size if log.exists() else 0
        self._is_done, self._has_logged, self._looked_at = standbys == 0, False, 0.0

    def look(self) -> None:
        """Start the next standby if it is time; called often, and looks each second."""
        if self._is_done or time.monotonic() < self._looked_at + _LOOK_S:
            return
        self._looked_at = time.monotonic()
        self._has_logged = self._has_logged or self._logged_a_step()
        if self._has_logged and self._following.stand_by(self._standbys):
            self._is_done = True

    def _logged_a_step(self) -> bool:
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(self._begin)
            return re.search(rb" step \d+/\d+ ", file.read()) is not None
        return False


def launch_module(config: Config, module: str, argv: Sequence[str]) -> int:
    """Run `python -m MODULE ARGV` in `launch.processes` processes on this host; return its exit status.

    Raises:
        UserError: this process is one of several itself.
    """
    return _attempt(LocalRanks(_processes(config), module), argv)[0]


def _standbys(settings: LocalLaunchConfig, processes: int) -> int:
    """How many processes stand by for a restart. UserError: some should, but no restart may come."""
    if settings.standby == "auto":
        return processes
    number = int(settings.standby)
    if number and not settings.max_restarts:
        raise UserError(
            f"launch.standby={settings.standby}, but launch.max_restarts=0: they wait for restarts alone; "
            "set launch.max_restarts to how many there may be, or launch.standby=auto"
        )
    return min(processes, number)


def _processes(config: Config) -> int:
    assert isinstance(config.launch, LocalLaunchConfig)
    if place().among_ranks:
        raise UserError(
            f"launch=local inside {place().launcher or 'ranks'} would start {place().world_size} runs; "
            "use only one of the two"
        )
    on_gpus = config.distributed.device != "cpu"
    return config.launch.processes or (num_gpus() if on_gpus else 0) or 1


def _attempt(
    ranks: LocalRanks, argv: Sequence[str], meanwhile: Callable[[], object] = lambda: None
) -> tuple[int, bool]:
    """Begin the attempt and wait for its end; return its status, and whether a signal stopped it.

    Args:
        meanwhile: called often until the end, or the first failure.
    """
    received: list[int] = []
    try:
        with stop_signals_to(partial(_forward_to, ranks.started, received)):
            if stood_by := ranks.begin(argv):
                _say(f"{stood_by} of its ranks stood by, with all imported")
            _wait(ranks.started, meanwhile)
    finally:
        codes = [process.poll() for process in ranks.started]
        ranks.end()
    return _status(codes, received), bool(received)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], meanwhile: Callable[[], object]) -> None:
    """Return when all have ended, or after the grace period that follows the first failure."""
    deadline = float("inf")
    while None in (codes := [process.poll() for process in ranks]) and time.monotonic() < deadline:
        if deadline == float("inf") and any(codes):
            has_told = codes[0] in (_MISTAKE, _NOT_FINITE)  # the others would report the same
            deadline = time.monotonic() + (0 if has_told else _GRACE_S)
        if deadline == float("inf"):
            meanwhile()
        time.sleep(_POLL_S)


def _status(codes: Sequence[int | None], received: Sequence[int]) -> int:
    """The launcher's exit status. Names the ranks that could not report their end themselves.

    Args:
        codes: those of the ranks; None if one had to be killed.
    """
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


def _fault(run_dir: Path) -> tuple[str, dict[str, Any]]:
    """The message of the fault that ended the last attempt, if it was recorded, and the fields by which the
    same fault is recognized. Messages differ: they contain pids and seconds."""
    try:
        found = load_json(run_dir / "failure.json")
        return printable(found["message"]), {name: found.get(name) for name in _OF_A_FAULT}
    except (OSError, UserError, KeyError):
        return "", {}


def num_gpus() -> int:
    """How many GPUs torch sees. Asked only if there is a driver, since importing torch takes seconds."""
    if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd"))):
        return 0
    import torch

    return torch.cuda.device_count()


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
