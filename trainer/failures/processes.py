"""The state of other processes of this host: stopped, or dead and why."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

EXITED = "left with exit status"


def surroundings() -> str:
    """Return what is equal for two processes that see each other's pids and can share memory and sockets.

    Two containers of one machine differ, even if they have the same name.
    """
    if sys.platform != "linux":
        return ""
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [
        file.readlink() for each in ("pid", "net", "user") if (file := Path("/proc/self/ns", each)).exists()
    ]
    return " ".join([kernel, *map(str, spaces), str(os.getuid())])


def state(pid: int) -> str:
    """running | stopped | dead. A zombie is dead: it only waits for its parent."""
    if pid == os.getpid():
        return "running"
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
    if fields is None or fields[0] not in "ZX" or len(fields) < 50:
        return None
    code = int(fields[49])  # as from wait(2)
    number = code & 0x7F
    if not number:
        return f"{EXITED} {code >> 8}"
    with contextlib.suppress(ValueError):
        return f"died of {signal.Signals(number).name}"
    return f"died of signal {number}"


def nameless_file(name: str) -> int:
    """A descriptor of an empty file, which no crash leaves behind; others open it at `place_of` it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:  # a Mac
        return os.dup(file.fileno())


def place_of(pid: int, fd: int) -> str:
    """The path at which a process opens a `nameless_file`; on a Mac only its own."""
    shown = "self" if pid == os.getpid() else pid  # /proc may count as another pid namespace does
    return f"/proc/{shown}/fd/{fd}" if sys.platform == "linux" else f"/dev/fd/{fd}"


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on (on a Mac, two of them); None if it does not exist."""
    if sys.platform != "linux":
        ps = ["ps", "-o", "state=", "-o", "ppid=", "-p", str(pid)]
        state, *more = subprocess.run(ps, capture_output=True, text=True).stdout.split() or [""]
        return [state[0], *more] if state else None
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def watch_for_death(pid: int) -> int:
    """A descriptor that polls as readable once the process is dead; -1 if the kernel has none."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # a Mac
        return -1
