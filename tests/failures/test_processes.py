"""States and deaths of other processes."""

from __future__ import annotations

import os
import signal
import time

from trainer.failures import processes


def test_the_state_and_the_death_of_a_child() -> None:
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
        assert processes.death_of(pid) is None
    finally:
        os.kill(pid, signal.SIGKILL)
    while processes.state(pid) != "dead":
        assert time.monotonic() < deadline
    assert processes.death_of(pid) == "died of SIGKILL"  # its parent has not collected its status yet
    os.waitpid(pid, 0)
    assert (processes.state(pid), processes.death_of(pid)) == ("dead", None)
