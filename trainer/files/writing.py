"""Write files atomically, and create new directories and unused paths."""

import itertools
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from trainer.errors import UserError, kind_of


@contextmanager
def atomic_file(path: Path, on_disk: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` on exit, unless an error occurs.

    With `on_disk`, wait until the data is on disk, so that the file is complete even after a power failure.
    """
    # A process id is not unique: containers on one file system may have equal ids.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            if on_disk:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def output_file(path: Path, replace: bool = False) -> Iterator[BinaryIO]:
    """Open an `atomic_file` at a path given by the user; an OSError becomes a UserError or RetryableError."""
    check_free(path, replace)
    try:
        with atomic_file(path, on_disk=True) as file:
            yield file
            file.flush()
            check_free(path, replace)
    except OSError as error:
        raise kind_of(error)(f"{path} cannot be written: {error.strerror or error}") from error


def check_free(path: Path, replace: bool = False) -> None:
    """Raise UserError if `path` cannot be created or, with `replace`, replaced."""
    if not path.parent.is_dir():
        raise UserError(f"cannot write {path}, because {path.parent} is not a directory; create it first")
    if not replace and os.path.lexists(path):
        raise UserError(f"{path} already exists; choose another path, or delete it")


def unused_path(path: Path) -> Path:
    """Return the first of `path`, `path`-2, `path`-3 and so on that does not exist, even as a broken link."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain([path], numbered) if not os.path.lexists(each))


def new_run_dir() -> Path:
    """Create the default run directory, runs/<date>/<time>, and return its path."""
    named = Path("runs", f"{datetime.now():%Y-%m-%d/%H-%M-%S}")
    named.parent.mkdir(parents=True, exist_ok=True)
    while True:  # mkdir is atomic, so two processes in the same second get different directories
        with suppress(FileExistsError):
            (path := unused_path(named)).mkdir()
            return path
