"""The command `ringmaster`; `python train.py` and `python -m trainer` do the same."""

import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from types import FrameType

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Run the command line."""
    if sys.platform not in ("linux", "darwin"):
        print(f"Ringmaster runs on Linux and macOS; this system is {sys.platform}", file=sys.stderr)
        sys.exit(2)
    for number in (signal.SIGINT, signal.SIGUSR1):
        if signal.getsignal(number) in (
            signal.SIG_DFL,
            signal.default_int_handler,
        ):  # unless the parent ignores it
            signal.signal(number, _interrupted)
    for name in ("trainer", "models"):
        found = import_module(name).__file__  # None: a folder without __init__.py
        if found is None or Path(found).resolve().parent != HERE / name:
            where = Path(found).parent if found else "a folder of that name"
            print(
                f"`import {name}` finds {where} before Ringmaster's own package, {HERE / name}: rename "
                f"your {name}, or start where it is not on the import path (PYTHONPATH, current directory)",
                file=sys.stderr,
            )
            sys.exit(2)
    from trainer.cli import main

    main()


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C and SLURM's SIGUSR1 until the run does, in one line instead of tracebacks of imports."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print("interrupted before the run began: nothing was trained", file=sys.stderr, flush=True)
    if number == signal.SIGUSR1:
        os._exit(75)  # the status of a stop; by default the signal would end this process with status 138
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main()
