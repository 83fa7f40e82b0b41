"""What the system says of other processes."""

from __future__ import annotations

import os
import signal
import time
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
        deadline = time.monotonic() + 10
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


@pytest.mark.parametrize(
    ("name", "text"),
    [("memory.events", "max 7\noom 1\noom_kill {}\n"), ("memory.oom_control", "under_oom 0\noom_kill {}\n")],
)
def test_a_kill_for_want_of_memory_is_seen(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text(text.format(3))
    monkeypatch.setattr(processes, "_of_cgroup", lambda: [tmp_path / name])
    kills = processes.MemoryKills()
    (tmp_path / name).write_text(text.format(4))
    assert kills.words() == f"for want of memory, says the cgroup ({tmp_path / name})"
    assert processes.MemoryKills().words() is None
