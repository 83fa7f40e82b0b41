"""failure.json: how a run, or one attempt of it, has failed."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.files.untrusted import load_json
from trainer.files.writing import atomic_file

NAME = "failure.json"
END_FILE = "RINGMASTER_END_FILE"  # where ranks of launch=local write their end, in an environment variable


def write(run_dir: Path, facts: dict[str, Any]) -> bool:
    """Write `facts` whole or not at all; return whether they are written.

    They must include `status` and `message`.
    Never raises: a full disk must not prevent the message to the user.
    """
    if not run_dir.is_dir():
        return False  # not this host's disk, or the run ended before it had a directory
    with contextlib.suppress(OSError), atomic_file(run_dir / NAME) as file:
        file.write(json.dumps(facts, indent=2).encode() + b"\n")
        return True
    return False


def read(run_dir: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, UserError):
        facts = load_json(run_dir / NAME)
        if isinstance(facts.get("status"), int):
            return facts
    return None


def written_at(run_dir: Path) -> int | None:
    """The file's modification time in ns: another time means another run, or attempt, has written it."""
    with contextlib.suppress(OSError):
        return (run_dir / NAME).stat().st_mtime_ns
    return None


def forget(run_dir: Path) -> None:
    """Remove the report of an earlier run or attempt."""
    with contextlib.suppress(OSError):
        (run_dir / NAME).unlink(missing_ok=True)


def tell_launcher(status: int, message: str) -> None:
    if (file_of_end := end_file()) is not None:
        with contextlib.suppress(OSError), atomic_file(file_of_end) as file:
            file.write(json.dumps({"status": status, "message": message}).encode())


def end_file() -> Path | None:
    """The file in which this attempt's ranks on this host record an end: one that a restart cannot help
    is final, and after a fault the next attempt waits.

    Under torchrun it lies in the directory of the attempt. torchrun creates a new one when it restarts all
    ranks only because hosts join or leave. launch=local returns the message to its caller.
    """
    if (told := os.environ.get(END_FILE)) is not None:
        return Path(told)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parents[1] / "ringmaster_end.json" if error_file is not None else None
