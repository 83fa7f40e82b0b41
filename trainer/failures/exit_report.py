"""Print and write the failure at the end of a run, and exit immediately."""

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer.errors import attempt_note
from trainer.failures.diagnosis import Failure
from trainer.files.untrusted import printable
from trainer.torch_private import flight_recorder
from trainer.troubleshooting import see

_MAX_CHARACTERS = 4000  # per line


def print_failure(failure: Failure, num_ranks: int, run_dir: Path | None) -> None:
    """Print the failure, unless it is an orderly end, which each rank prints itself.

    Args:
        run_dir: the directory of failure.json; None if the file was not written.
    """
    if failure.kind == "orderly":
        return
    others = num_ranks - len(failure.ranks)
    tail = f"\n  the other {others} ranks exit with status {failure.status}" if others > 1 else ""
    tail += attempt_note()
    files = f"; see {run_dir}/failure.json and stacks/" if run_dir is not None else ""
    print_line(f"\n{printable(failure.message, _MAX_CHARACTERS)}{tail}{files}{see(failure.message)}")


def print_line(line: str) -> None:
    """Print with a single system call, because a thread may hold the locks of Python's buffers forever.

    Control characters other than newlines are escaped, because part of the line may come from another host.
    """
    shown = "\n".join(printable(part, _MAX_CHARACTERS) for part in line.split("\n"))
    with contextlib.suppress(OSError):  # the reader may have died
        os.write(2, f"{shown}\n".encode())


def write_logs(failure: Failure, run_dir: Path | None, stacks: Mapping[int, str]) -> None:
    """Write the failure to train.log, and the stack of each rank to stacks/."""
    if run_dir is None or not run_dir.is_dir():
        return
    with contextlib.suppress(OSError), (run_dir / "train.log").open("a") as log:
        log.write(f"{printable(failure.message, _MAX_CHARACTERS)}\n")
    with contextlib.suppress(OSError):
        for rank, text in stacks.items():
            (run_dir / "stacks").mkdir(exist_ok=True)
            (run_dir / "stacks" / f"rank{rank}.txt").write_text(text)


def write_collectives(run_dir: Path | None, rank: int) -> None:
    """Write the last collectives of this rank, from torch's flight recorder, to stacks/. Never raise.

    The environment variable `TORCH_FR_BUFFER_SIZE=N` makes gloo and NCCL record the last N collectives.
    """
    if run_dir is None or os.environ.get("TORCH_FR_BUFFER_SIZE", "0") == "0":
        return
    with contextlib.suppress(OSError, RuntimeError):
        if (record := flight_recorder()) is not None:
            (run_dir / "stacks").mkdir(exist_ok=True)
            (run_dir / "stacks" / f"rank{rank}.collectives.json").write_bytes(record)


def exit_now(status: int) -> None:
    """Exit without the clean-up of torch and Python, which might wait for a dead rank."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
