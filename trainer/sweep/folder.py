"""The folder of a sweep: made by one mkdir, held against a second sweeper."""

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
    """Make hydra.sweep.dir, or go on in it, and hold it.

    One that is named by the time of day is made anew, though another sweep began in the same second.

    Raises:
        UserError: another sweep lives in it, or it cannot be written.
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
    """A record lock, which the kernel lets go of when this process ends; the trials do not inherit it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = printable(os.pread(descriptor, 4096, 0).decode(errors="replace")) or "not known"
        raise UserError(
            f"another sweep is alive in hydra.sweep.dir={folder}: {owner}; wait for its end, stop it, "
            "or take another hydra.sweep.dir"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
