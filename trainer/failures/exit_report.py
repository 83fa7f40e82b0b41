"""The end of a failed run: its failure is printed and written, and then the process exits at once."""

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

_LONGEST = 4000  # characters of a line


def say(failure: Failure, num_ranks: int, run_dir: Path | None) -> None:
    """Print the failure, except for an orderly end, which each rank prints itself.

    Args:
        run_dir: where it was written, if it was.
    """
    if failure.kind == "orderly":
        return
    others = num_ranks - len(failure.ranks)
    tail = f"\n  the other {others} ranks end, status {failure.status}" if others > 1 else ""
    tail += attempt_note()
    kept = f"; {run_dir}/failure.json and stacks/ say more" if run_dir is not None else ""
    print_line(f"\n{printable(failure.message, _LONGEST)}{tail}{kept}{see(failure.message)}")


def print_line(line: str) -> None:
    """Print in one piece, without Python's buffers and locks, which another thread may hold forever.

    Another host may have written part of it: control characters are escaped, except newlines.
    """
    shown = "\n".join(printable(part, _LONGEST) for part in line.split("\n"))
    with contextlib.suppress(OSError):  # the reader may have died
        os.write(2, f"{shown}\n".encode())


def keep(failure: Failure, run_dir: Path | None, stacks: Mapping[int, str]) -> None:
    """Write the failure to train.log, and the stacks, by rank."""
    if run_dir is None or not run_dir.is_dir():
        return
    with contextlib.suppress(OSError), (run_dir / "train.log").open("a") as log:
        log.write(f"{printable(failure.message, _LONGEST)}\n")
    with contextlib.suppress(OSError):
        for rank, text in stacks.items():
            (run_dir / "stacks").mkdir(exist_ok=True)
            (run_dir / "stacks" / f"rank{rank}.txt").write_text(text)


def keep_collectives(run_dir: Path | None, rank: int) -> None:
    """Write torch's flight recorder, the last collectives of this rank, beside its stack; never raises.

    `TORCH_FR_BUFFER_SIZE=N` in the environment of every rank has gloo and NCCL keep the last N.
    """
    if run_dir is None or os.environ.get("TORCH_FR_BUFFER_SIZE", "0") == "0":
        return
    with contextlib.suppress(OSError, RuntimeError):
        if (record := flight_recorder()) is not None:
            (run_dir / "stacks").mkdir(exist_ok=True)
            (run_dir / "stacks" / f"rank{rank}.collectives.json").write_bytes(record)


def leave(status: int) -> None:
    """End this process now: torch and Python must not wait for a peer that is gone."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
