"""The signal that asks a process for its stacks: answered while it is watched, and harmless after."""

import os
import time

from trainer.faults.stacks import STACK_SIGNAL, StackReader, Stacks


def test_a_process_on_its_way_out_is_not_killed_by_the_question() -> None:
    stacks = Stacks()
    pid = os.fork()
    if not pid:
        stacks.open(crashes=False)
        os.kill(os.getpid(), STACK_SIGNAL)
        stacks.close()
        os.kill(os.getpid(), STACK_SIGNAL)
        os._exit(7)
    reader = StackReader(os.getpid(), stacks.fd)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    deadline = time.monotonic() + 100
    while "test_a_process_on_its_way_out" not in reader.read():
        assert time.monotonic() < deadline
    reader.close()
