"""failure.json: how a run, or one attempt of it, has failed."""

import contextlib
import json
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.files.untrusted import load_json
from trainer.files.writing import atomic_file

NAME = "failure.json"


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
