"""failure.json: how a run ended that did not end well."""

import contextlib
import json
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.untrusted import load_json
from trainer.whole_file import atomic_file

NAME = "failure.json"


def write(run_dir: Path, facts: dict[str, Any]) -> None:
    """Write `facts` whole or not at all; `status` and `message` among them.

    Never raises: a disk that takes no more must not come before what it is to be told.
    """
    if not run_dir.is_dir():
        return  # another host's disk, or the run ended before it had one
    with contextlib.suppress(OSError), atomic_file(run_dir / NAME, on_disk=False) as file:
        file.write(json.dumps(facts, indent=2).encode() + b"\n")


def read(run_dir: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, UserError):
        facts = load_json(run_dir / NAME)
        if isinstance(facts.get("status"), int):
            return facts
    return None


def forget(run_dir: Path) -> None:
    """What an earlier run, or attempt, left says nothing of the one that begins."""
    with contextlib.suppress(OSError):
        (run_dir / NAME).unlink(missing_ok=True)
