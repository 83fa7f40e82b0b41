"""Files that appear whole or not at all, new directories, and paths that are free."""

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
    """Write to a file beside `path`, which replaces `path` at the end; after an error `path` is unchanged.

    Args:
        on_disk: whether to wait until the data is on disk, so that it is whole even after a power failure;
            a slow disk delays the caller.

    Raises:
        OSError: for instance, the disk is full.
    """
    # Not by pid: containers on one file system may have equal ones.
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
    """`atomic_file` for a name given by a user: an existing file is kept, unless `replace`.

    Raises:
        UserError, RetryableError: in place of an OSError, such as a full disk; or the file exists.
    """
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
        raise UserError(f"{path.parent} is not a directory, so {path.name} cannot be written there")
    if not replace and os.path.lexists(path):
        raise UserError(f"{path} exists already; choose another file, or delete it")


def unused_path(path: Path) -> Path:
    """`path`, or the first of `path`-2, `path`-3 and so on where nothing is, not even a broken link."""
    beside = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain([path], beside) if not os.path.lexists(each))


def new_run_dir() -> Path:
    """Create a directory for a run that chose none, under runs/ and named after the time. Raises OSError."""
    named = Path("runs", f"{datetime.now():%Y-%m-%d/%H-%M-%S}")
    named.parent.mkdir(parents=True, exist_ok=True)
    while True:  # mkdir decides: two processes in the same second get two
        with suppress(FileExistsError):
            (path := unused_path(named)).mkdir()
            return path
