"""The signal that asks a process for its stacks: answered while it is watched, harmless before and after."""

import os
import signal
import time

from trainer.faults.stacks import STACK_SIGNAL, StackReader, Stacks


def test_a_process_that_comes_or_goes_is_not_killed_by_the_question() -> None:
    signal.signal(STACK_SIGNAL, signal.SIG_DFL)
    stacks = Stacks()
    pid = os.fork()
    if not pid:
        os.kill(os.getpid(), STACK_SIGNAL)
        stacks.open(crashes=False)
        os.kill(os.getpid(), STACK_SIGNAL)
        stacks.close()
        os.kill(os.getpid(), STACK_SIGNAL)
        os._exit(7)
    reader = StackReader(os.getpid(), stacks.fd)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    deadline = time.monotonic() + 100
    while "test_a_process_that_comes_or_goes" not in reader.read():
        assert time.monotonic() < deadline
    reader.close()
