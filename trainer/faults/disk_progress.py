"""What code that reads or writes files tells the heartbeat of its process, which it does not know."""

import contextlib
from collections.abc import Iterator

from trainer.faults.heartbeat import Heartbeat

_of_this_process: Heartbeat | None = None


def set_mine(heartbeat: Heartbeat) -> None:
    """Make `heartbeat` the one that `progress` updates."""
    global _of_this_process
    _of_this_process = heartbeat


def progress() -> None:
    """Called by code that writes files part by part, without access to the heartbeat."""
    if _of_this_process is not None:
        _of_this_process.progress()


@contextlib.contextmanager
def at_disk() -> Iterator[None]:
    """As Heartbeat.at_disk, for the same code."""
    with contextlib.nullcontext() if _of_this_process is None else _of_this_process.at_disk():
        yield
