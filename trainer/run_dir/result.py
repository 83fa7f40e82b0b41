"""result.json: the metrics of a run that reached its last step."""

import contextlib
import json
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.files.untrusted import load_json
from trainer.files.writing import output_file

NAME = "result.json"


def write(run_dir: Path, result: dict[str, Any], made_steps: bool) -> None:
    """Write `result`, whole or not at all; without new steps, keep the file of this run at this step.

    Raises:
        UserError: the disk is full.
    """
    if not made_steps and _steps(run_dir) == result["steps"]:
        return
    with output_file(run_dir / NAME, replace=True) as file:
        file.write(json.dumps(result, indent=2).encode() + b"\n")


def _steps(run_dir: Path) -> object:
    with contextlib.suppress(OSError, UserError):
        return load_json(run_dir / NAME).get("steps")
    return None
