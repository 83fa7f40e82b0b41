"""The end of a failed run: its verdict is printed and written, and then the process exits at once."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.errors import UserError, which_try
from trainer.faults.verdict import Observed, Verdict
from trainer.files.untrusted import load_json, printable
from trainer.files.writing import atomic_file
from trainer.troubleshooting import see

FAILURE = "failure.json"


def write_failure(run_dir: Path, facts: dict[str, Any]) -> bool:
    """Write `facts` whole or not at all; return whether they are written.

    They must include `status` and `message`.
    Never raises: a full disk must not prevent the message to the user.
    """
    if not run_dir.is_dir():
        return False  # not this host's disk, or the run ended before it had a directory
    with contextlib.suppress(OSError), atomic_file(run_dir / FAILURE) as file:
        file.write(json.dumps(facts, indent=2).encode() + b"\n")
        return True
    return False


def read_failure(run_dir: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, UserError):
        facts = load_json(run_dir / FAILURE)
        if isinstance(facts.get("status"), int):
            return facts
    return None


def failure_written_at(run_dir: Path) -> int | None:
    """The file's modification time in ns: another time means another run, or attempt, has written it."""
    with contextlib.suppress(OSError):
        return (run_dir / FAILURE).stat().st_mtime_ns
    return None


def forget_failure(run_dir: Path) -> None:
    """Remove the report of an earlier run or attempt."""
    with contextlib.suppress(OSError):
        (run_dir / FAILURE).unlink(missing_ok=True)


_LOOKED_S = 0.3  # torchrun looks at its ranks every 0.1 s
_LONGEST = 4000  # characters of a line


def say(verdict: Verdict, num_ranks: int, run_dir: Path | None) -> None:
    """Print the verdict, except for an orderly end, which each rank prints itself.

    Args:
        run_dir: where it was written, if it was.
    """
    if verdict.kind == "orderly":
        return
    others = num_ranks - len(verdict.ranks)
    tail = f"\n  the other {others} ranks end, status {verdict.status}" if others > 1 else ""
    tail += which_try()
    kept = f"; {run_dir}/failure.json and stacks/ say more" if run_dir is not None else ""
    print_line(f"\n{printable(verdict.message, _LONGEST)}{tail}{kept}{see(verdict.message)}")


def print_line(line: str) -> None:
    """Print in one piece, without Python's buffers and locks, which another thread may hold forever.

    Another host may have written part of it: control characters are escaped, except newlines.
    """
    shown = "\n".join(printable(part, _LONGEST) for part in line.split("\n"))
    with contextlib.suppress(OSError):  # the reader may have died
        os.write(2, f"{shown}\n".encode())


def keep(verdict: Verdict, run_dir: Path | None, stacks: Mapping[int, str]) -> None:
    """Write the verdict to train.log, and the stacks, by rank."""
    if run_dir is None or not run_dir.is_dir():
        return
    with contextlib.suppress(OSError), (run_dir / "train.log").open("a") as log:
        log.write(f"{printable(verdict.message, _LONGEST)}\n")
    with contextlib.suppress(OSError):
        for rank, text in stacks.items():
            (run_dir / "stacks").mkdir(exist_ok=True)
            (run_dir / "stacks" / f"rank{rank}.txt").write_text(text)


def let_torchrun_look() -> None:
    """Make sure that torchrun sees who failed first: it counts whole seconds, and of ranks that end within
    one it blames the lowest."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        time.sleep(max(_LOOKED_S, 1.01 - time.time() % 1.0))


def leave(status: int) -> None:
    """End this process now: torch and Python must not wait for a peer that is gone."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def of_one(rank: Observed, status: int, message: str) -> Verdict:
    """The verdict of an orderly end because of `rank`."""
    keys = ("rank", "phase", "where", "step")
    facts = {key: value for key, value in asdict(rank).items() if key in keys}
    facts |= {"host": rank.hostname, "silent_s": 0.0}
    return Verdict((rank.rank,), "orderly", status, message, facts)
