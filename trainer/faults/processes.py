"""The state of other processes of this host: stopped, or dead and why."""

import contextlib
import os
import signal
from pathlib import Path

EXITED = "left with exit status"


def state(pid: int) -> str:
    """running | stopped | dead. A zombie is dead: it only waits for its parent."""
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return "dead"
    return "stopped" if fields[0] in "Tt" else "running"


def parent(pid: int) -> int | None:
    """The pid of the parent; None if the process does not exist."""
    fields = _stat(pid)
    return None if fields is None else int(fields[1])


def death_of(pid: int) -> str | None:
    """How a process that just died has ended; None once its parent has collected it."""
    fields = _stat(pid)
    if fields is None or fields[0] not in "ZX":
        return None
    code = int(fields[49])  # as from wait(2)
    number = code & 0x7F
    if not number:
        return f"{EXITED} {code >> 8}"
    with contextlib.suppress(ValueError):
        return f"died of {signal.Signals(number).name}"
    return f"died of signal {number}"


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; None if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def watch_for_death(pid: int) -> int:
    """A descriptor that polls as readable once the process is dead; -1 if the kernel has none."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1
