"""A directory that nobody else has: for a run, or for a sweep."""

import contextlib
import itertools
from pathlib import Path


def new_directory(base: Path) -> Path:
    """Make `base`, or `base`-2 and so on. mkdir alone decides: two that start in the same second get two.

    Raises:
        OSError: it cannot be made, for another reason than that it is there.
    """
    base.parent.mkdir(parents=True, exist_ok=True)
    for n in itertools.count(1):
        path = base if n == 1 else Path(f"{base}-{n}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("unreachable")
