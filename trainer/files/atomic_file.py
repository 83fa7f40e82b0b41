"""Files that appear whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from trainer.errors import UserError


@contextmanager
def atomic_file(path: Path, on_disk: bool = False) -> Iterator[BinaryIO]:
    """Write to a file beside `path`, which replaces it at the end; after an error `path` is as it was.

    Args:
        on_disk: whether to wait until the disk has it, so that it is whole after a power failure, too; a slow
            disk holds the caller up meanwhile.

    Raises:
        OSError: the disk is full, for instance.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
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
    """`atomic_file` for a name that a user gave: an existing file is kept, unless `replace`.

    Raises:
        UserError: for an OSError, a full disk for instance; or the name is taken.
    """
    check_free(path, replace)
    try:
        with atomic_file(path, on_disk=True) as file:
            yield file
            file.flush()
            check_free(path, replace)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error


def check_free(path: Path, replace: bool = False) -> None:
    """Raise UserError where `path` cannot become a new file, or, with `replace`, another one."""
    if not path.parent.is_dir():
        raise UserError(f"{path.parent} is no directory to write {path.name} in")
    if not replace and os.path.lexists(path):
        raise UserError(f"{path} exists already; name another file, or delete it")
