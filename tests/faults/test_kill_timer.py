"""A process whose watch cannot run ends; a suspension of all takes no time."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import ctypes, os, signal, sys
from trainer.faults.heartbeat import TICK_OFFSET, Heartbeat
from trainer.faults.kill_timer import KillTimer
heartbeat = Heartbeat()
timer = KillTimer(heartbeat.fd, TICK_OFFSET, 1.0, counts_stops=sys.argv[2] == "counted")
print("begun", flush=True)
if sys.argv[1] == "held":
    ctypes.PyDLL(None).sleep(30)  # PyDLL keeps the interpreter
else:
    os.kill(os.getpid(), signal.SIGSTOP)
timer.cancel()
print("went on")
"""


@pytest.mark.slow
def test_one_that_cannot_run_ends_but_a_suspension_takes_no_time() -> None:
    """`held` by a thread, `stopped` alone or with all that belong to it; stops are counted or not."""
    cases = [("held", ""), ("stopped", "counted"), ("stopped", ""), ("suspended", "counted")]
    with contextlib.ExitStack() as stack:
        started = []
        for case in cases:
            command = [sys.executable, "-c", PROGRAM, *case]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
            )
            stack.callback(process.kill)
            started.append(process)
        for process in started:
            assert process.stdout is not None and process.stdout.readline() == "begun\n"
        os.killpg(started[3].pid, signal.SIGSTOP)
        time.sleep(3.0)
        for process in started[2:]:
            os.killpg(process.pid, signal.SIGCONT)
        ends = [(*process.communicate(timeout=20), process.returncode) for process in started]
    assert [code for *_, code in ends] == [-signal.SIGKILL, -signal.SIGKILL, 0, 0], ends
    assert [out for out, *_ in ends] == ["", "", "went on\n", "went on\n"], ends
