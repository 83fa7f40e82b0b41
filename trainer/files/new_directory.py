"""New directories for runs and sweeps, and paths that are free."""

import contextlib
import itertools
import os
from datetime import datetime
from pathlib import Path


def new_directory(base: Path) -> Path:
    """Create `base`, or `base`-2 and so on. mkdir decides: two processes in the same second get two.

    Raises:
        OSError: it cannot be created, for another reason than that it exists.
    """
    base.parent.mkdir(parents=True, exist_ok=True)
    for n in itertools.count(1):
        path = base if n == 1 else Path(f"{base}-{n}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("unreachable")


def unused_path(path: Path) -> Path:
    """`path`, or the first of `path`-2, `path`-3 and so on where nothing is, not even a broken link."""
    beside = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain([path], beside) if not os.path.lexists(each))


def new_run_dir() -> Path:
    """Create a directory for a run that chose none, under runs/ and named after the time. Raises OSError."""
    return new_directory(Path("runs", f"{datetime.now():%Y-%m-%d/%H-%M-%S}"))
