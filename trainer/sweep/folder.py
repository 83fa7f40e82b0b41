"""The folder of a sweep, created atomically and locked against a second sweep."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from trainer.errors import UserError
from trainer.files.new_directory import new_directory
from trainer.files.untrusted import printable


@contextlib.contextmanager
def sweep_folder(named: DictConfig) -> Iterator[Path]:
    """Create hydra.sweep.dir, or continue in it, and lock it.

    A folder named by the time of day is always a new one, even if another sweep began in the same second.

    Raises:
        UserError: another sweep runs in it, or it cannot be written.
    """
    unresolved = OmegaConf.to_container(named, resolve=False)
    assert isinstance(unresolved, dict)
    folder = Path(named.dir)
    try:
        if "${now:" in unresolved["dir"]:
            folder = new_directory(folder)
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"hydra.sweep.dir={folder} cannot be written: {error}") from error
    try:
        _lock(descriptor, folder)
        yield folder
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    """Take a record lock, which the kernel frees when this process ends; trials do not inherit it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = printable(os.pread(descriptor, 4096, 0).decode(errors="replace")) or "not known"
        raise UserError(
            f"another sweep runs in hydra.sweep.dir={folder}: {owner}; wait for its end, stop it, "
            "or set another hydra.sweep.dir"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
