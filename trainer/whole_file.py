"""A file that appears whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from trainer.errors import UserError


@contextmanager
def whole_file(path: Path, replace: bool = False) -> Iterator[BinaryIO]:
    """Write to a file beside `path`, which takes that name at the end, on disk by then; or it goes.

    Args:
        replace: one of that name that is there already.

    Raises:
        UserError: for an OSError, a full disk for instance; or the name is taken.
    """
    check_free(path, replace)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        check_free(path, replace)
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def check_free(path: Path, replace: bool = False) -> None:
    """Raise UserError where `path` cannot become a new file, or, with `replace`, another one."""
    if not path.parent.is_dir():
        raise UserError(f"{path.parent} is no directory to write {path.name} in")
    if not replace and os.path.lexists(path):
        raise UserError(f"{path} exists already; name another file, or delete it")
