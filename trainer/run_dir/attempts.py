"""code.json: the code, the versions and the hardware of each attempt (start or resume) of a run."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.errors import UserError, writing
from trainer.files.untrusted import load_json
from trainer.files.writing import atomic_file

FILE = "code.json"
_GIT_S = 1.0  # a repository on a slow disk may take minutes
_TRAINER = str(Path(__file__).parents[1]) + os.sep


@dataclass(frozen=True)
class RunAttempt:
    """An attempt: a part of a run, from its start or a resume to its end or the next resume."""

    first_step: int
    """The step of the checkpoint from which the attempt resumed; 0 without one."""
    started: float
    """In seconds since 1970."""
    strategy: str
    world_size: int
    environment: dict[str, str]
    """Versions and hardware by name, see `trainer.exact.environment`."""
    git: str | None
    """The commit of the current directory, followed by -dirty if tracked files had changed."""
    code: dict[str, str]
    """A hash of each imported source file that is neither installed nor part of the trainer, by module."""
    start: str | None = None
    """The checkpoint of another run from which the attempt started."""


def record_attempt(
    run_dir: Path,
    first_step: int,
    strategy: str,
    world_size: int,
    environment: dict[str, str],
    start: str | None,
) -> None:
    """Append this attempt to code.json; called on rank 0."""
    facts = (strategy, world_size, environment, _git(), code_hashes(), start)
    now = RunAttempt(first_step, time.time(), *facts)
    attempts = [asdict(each) for each in [*read_attempts(run_dir), now]]
    with writing(run_dir), atomic_file(run_dir / FILE) as file:
        file.write(json.dumps({"attempts": attempts}, indent=1).encode() + b"\n")


def read_attempts(run_dir: Path) -> list[RunAttempt]:
    """Return the attempts of a run, oldest first; [] if the file is missing or damaged."""
    with contextlib.suppress(OSError, UserError, KeyError, TypeError):
        return [RunAttempt(**each) for each in load_json(run_dir / FILE)["attempts"]]
    return []


def attempt_of(run_dir: Path, step: int) -> RunAttempt | None:
    """Return the last attempt that ran `step`; None if it is unknown."""
    made_by = [each for each in read_attempts(run_dir) if each.first_step < step]
    return made_by[-1] if made_by else None


def _git() -> str | None:
    """Return the commit of the current directory; None without a repository or git, or if git is slow."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, env=environment)
        return done.stdout.strip() or None
    return None


def code_hashes() -> dict[str, str]:
    installed = tuple({path + os.sep for path in sysconfig.get_paths().values()} | {_TRAINER})
    hashes = {}
    for name, module in list(sys.modules.items()):
        file = str(vars(module).get("__file__"))
        is_source = file.endswith(".py") and name != "__mp_main__" and not name.startswith("hydra_plugins.")
        if is_source and "site-packages" not in file and not file.startswith(installed):
            with contextlib.suppress(OSError):
                hashes[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    return dict(sorted(hashes.items()))
