"""failure.json: the report on the failure of a run or of one of its attempts."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.files.untrusted import load_json
from trainer.files.writing import atomic_file

NAME = "failure.json"
END_FILE = "RINGMASTER_END_FILE"  # the variable in which launch=local names the `end_file`


def write(run_dir: Path, facts: dict[str, Any]) -> bool:
    """Write `facts`, including `status` and `message`, atomically. Return False on failure; never raise."""
    if not run_dir.is_dir():
        return False  # it is on another host's disk, or the run ended before creating it
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
    """Return the file's modification time in ns, which changes whenever a run or attempt writes it."""
    with contextlib.suppress(OSError):
        return (run_dir / NAME).stat().st_mtime_ns
    return None


def remove(run_dir: Path) -> None:
    """Remove the report of a previous run or attempt."""
    with contextlib.suppress(OSError):
        (run_dir / NAME).unlink(missing_ok=True)


def report_to_launcher(status: int, message: str) -> None:
    if (path := end_file()) is not None:
        with contextlib.suppress(OSError), atomic_file(path) as file:
            file.write(json.dumps({"status": status, "message": message}).encode())


def end_file() -> Path | None:
    """Return the file to which this attempt's ranks on this host write how they ended, if any.

    The launcher reads it to decide whether to restart: a restart cannot fix a user error, and after a
    retryable error the next attempt waits. Under torchrun the file is in the directory of the attempt.
    """
    if (path := os.environ.get(END_FILE)) is not None:
        return Path(path)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parents[1] / "ringmaster_end.json" if error_file is not None else None
