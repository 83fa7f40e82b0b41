"""Ends a rank whose watch does not run: the process is stopped, or one of its threads holds the interpreter.

No thread of Python can do so then, thus another process does. It counts only seconds in which it ran itself:
a suspension of both, such as `docker pause` or SLURM's suspend, takes no time.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_LOOKS_S = 0.5


class KillTimer:
    """A process that sends SIGKILL to this one when a word of memory has been the same for `after_s`.

    Args:
        memory: descriptor of a file in which each look of the watch changes the eight bytes at `offset`.
        counts_stops: time in which this process is stopped counts, too: others, on other hosts, wait for it.
    """

    def __init__(self, memory: int, offset: int, after_s: float, counts_stops: bool) -> None:
        facts = (os.getpid(), offset, after_s, int(counts_stops))
        # Without this one's open files and environment: it is no rank, and holds no connection of a rank.
        kept = {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *map(str, facts)],
            stdin=memory,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=kept,
        )

    def cancel(self) -> None:
        self._process.kill()
        self._process.wait()


def _count(pid: int, offset: int, after_s: float, counts_stops: bool) -> None:
    seen, same_s = b"", 0.0
    while os.getppid() == pid:
        time.sleep(_LOOKS_S)
        word = os.pread(0, 8, offset)
        if word != seen:
            seen, same_s = word, 0.0
        elif counts_stops or not _is_stopped(pid):
            same_s += _LOOKS_S  # once, however long the sleep took
        if same_s > after_s and os.getppid() == pid:
            os.kill(pid, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


if __name__ == "__main__":
    _count(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4] == "1")
