"""The state of other processes of this host: stopped, dead and why, or killed for lack of memory."""

import contextlib
import fcntl
import os
import signal
import struct
from collections.abc import Iterable
from pathlib import Path


def state(pid: int) -> str:
    """running | stopped | dead. A zombie is dead: it only waits for its parent."""
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return "dead"
    return "stopped" if fields[0] in "Tt" else "running"


def executes(pid: int) -> bool:
    """Whether its main thread has a processor, or is next in turn: it does not sleep, nor is it stopped."""
    fields = _stat(pid)
    return fields is not None and fields[0] == "R"


def parent(pid: int) -> int | None:
    """The pid of the parent; None if the process does not exist."""
    fields = _stat(pid)
    return None if fields is None else int(fields[1])


def ending(pid: int, pidfd: int = -1) -> str | None:
    """How a process that just died has ended; None once its parent has collected it, before Linux 6.15."""
    fields = _stat(pid)
    if fields is not None and fields[0] in "ZX":
        code: int | None = int(fields[49])  # as from wait(2)
    else:
        code = _kept_status(pidfd)
    if code is None:
        return None
    number = code & 0x7F
    if not number:
        return f"left with exit status {code >> 8}"
    with contextlib.suppress(ValueError):
        return f"died of {signal.Signals(number).name}"
    return f"died of signal {number}"


_GET_INFO, _INFO_EXIT, _INFO = 0xC040FF0B, 8, struct.Struct("=QQ11Ii")  # from <linux/pidfd.h>


def _kept_status(pidfd: int) -> int | None:
    """The status that the kernel keeps for who has a descriptor of the process; None if it does not."""
    with contextlib.suppress(OSError):
        answer = fcntl.ioctl(pidfd, _GET_INFO, _INFO.pack(_INFO_EXIT, *[0] * 13)) if pidfd != -1 else b""
        if answer and _INFO.unpack(answer)[0] & _INFO_EXIT:
            return int(_INFO.unpack(answer)[-1])
    return None


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; None if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


class MemoryKills:
    """Counts the kernel's kills for lack of memory since this object was created, if they can be read.

    Args:
        pids: processes whose control groups are read too; each may have its own.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        of_groups = [file for pid in pids for file in memory_files_of(pid)]
        self._sources = [Path("/proc/vmstat"), *dict.fromkeys(of_groups)]
        self._before = {path: _oom_kills(path) for path in self._sources}

    def words(self) -> str | None:
        """The source that reports a kill; None if there is none."""
        for path in reversed(self._sources):  # a cgroup first: it is smaller than the whole machine
            if _oom_kills(path) > self._before[path]:
                who = "the kernel" if path.name == "vmstat" else "the cgroup"
                return f"for lack of memory, according to {who} ({path})"
        return None


def memory_files_of(pid: int | str) -> list[Path]:
    """memory.events of a process's control group (version 2) or memory.oom_control (1)."""
    files = []
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                files.append(Path("/sys/fs/cgroup" + path.rstrip("/"), "memory.events"))
                files.append(Path("/sys/fs/cgroup/memory.events"))  # as a container sees its own
            elif "memory" in controllers.split(","):
                files.append(Path("/sys/fs/cgroup/memory" + path.rstrip("/"), "memory.oom_control"))
    return [file for file in files if file.is_file()]


def _oom_kills(path: Path) -> int:
    with contextlib.suppress(OSError):
        return numbers_in(path).get("oom_kill", 0)
    return 0


def numbers_in(path: Path) -> dict[str, int]:
    """The lines `NAME NUMBER` or `NAME: NUMBER kB` of a file of the kernel. OSError: it cannot be read."""
    lines = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def watch_for_death(pid: int) -> int:
    """A descriptor that polls as readable once the process is dead; -1 if the kernel has none."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1
