"""What the system reports about other processes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.faults import processes


def test_how_a_child_is_and_how_it_ended() -> None:
    pid = os.fork()
    if not pid:
        signal.pause()
        os._exit(0)
    try:
        assert processes.state(pid) == "running"
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + 100
        while processes.state(pid) != "stopped":
            assert time.monotonic() < deadline
        assert processes.ending(pid) is None
    finally:
        os.kill(pid, signal.SIGKILL)
    while processes.state(pid) != "dead":
        assert time.monotonic() < deadline
    assert processes.ending(pid) == "died of SIGKILL"  # its parent has not asked yet
    os.waitpid(pid, 0)
    assert (processes.state(pid), processes.ending(pid)) == ("dead", None)


def test_a_kill_for_want_of_memory_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, text = tmp_path / "memory.events", "max 7\noom 1\noom_kill {}\n"
    file.write_text(text.format(3))
    monkeypatch.setattr(processes, "memory_files_of", lambda pid: [file])
    kills = processes.MemoryKills([1])
    file.write_text(text.format(4))
    assert kills.words() == f"for lack of memory, according to the cgroup ({file})"
    assert processes.MemoryKills([1]).words() is None


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A control group (version 1 or 2) below this process's own."""
    mine = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    roots = [Path("/sys/fs/cgroup/memory" + mine.get("memory", "/"), f"rm{os.getpid()}")]
    roots += [Path("/sys/fs/cgroup" + mine.get("", "/"), f"rm{os.getpid()}")]
    for group in roots:
        limit = group / ("memory.limit_in_bytes" if "memory" in group.parts else "memory.max")
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                limit.write_text(str(limit_bytes))
                yield group
                return
            finally:
                group.rmdir()
    pytest.skip("no control group for memory can be made here: that needs root, and the right to")


def test_a_process_killed_for_want_of_memory_is_told_from_others() -> None:
    with memory_group(64 << 20) as group:
        goes_on, tell = os.pipe()
        pid = os.fork()
        if not pid:
            os.read(goes_on, 1)
            held = [bytearray(8 << 20) for _ in range(100)]
            os._exit(len(held))
        (group / "cgroup.procs").write_text(str(pid))
        kills = processes.MemoryKills([os.getpid(), pid])
        os.write(tell, b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        words = kills.words()
    assert words is not None
    assert words.startswith(f"for lack of memory, according to the cgroup ({group}/memory.")
