"""The state of other processes on this host: running, stopped, or dead and how they died."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

EXITED = "exited with status"


def surroundings() -> str:
    """Return an identifier of the machine, namespaces and user of this process.

    Processes with the same identifier see each other's pids and can share memory and sockets. Two containers
    on one machine have different identifiers, even if they have the same host name.
    """
    if sys.platform != "linux":
        return ""
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [
        file.readlink() for each in ("pid", "net", "user") if (file := Path("/proc/self/ns", each)).exists()
    ]
    return " ".join([kernel, *map(str, spaces), str(os.getuid())])


def state(pid: int) -> str:
    """Return running, stopped or dead. A zombie is dead, because it only waits for its parent."""
    if pid == os.getpid():
        return "running"
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return "dead"
    return "stopped" if fields[0] in "Tt" else "running"


def parent(pid: int) -> int | None:
    """Return the pid of the parent; None if the process does not exist."""
    fields = _stat(pid)
    return None if fields is None else int(fields[1])


def death_of(pid: int) -> str | None:
    """Return how a process died; None if its parent has already collected its status."""
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
    """Return the descriptor of a new file without a name, which other processes open at `path_of_fd`."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:  # macOS
        return os.dup(file.fileno())


def path_of_fd(pid: int, fd: int) -> str:
    """Return the path at which to open a `nameless_file` of process `pid`; on macOS, of this process only."""
    shown = "self" if pid == os.getpid() else pid  # /proc may show the pids of another namespace
    return f"/proc/{shown}/fd/{fd}" if sys.platform == "linux" else f"/dev/fd/{fd}"


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat, from the process state on; on macOS, the state and the parent."""
    if sys.platform != "linux":
        ps = ["ps", "-o", "state=", "-o", "ppid=", "-p", str(pid)]
        state, *more = subprocess.run(ps, capture_output=True, text=True).stdout.split() or [""]
        return [state[0], *more] if state else None
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def watch_for_death(pid: int) -> int:
    """Return a descriptor that becomes readable once the process is dead; -1 if not supported."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # macOS
        return -1
