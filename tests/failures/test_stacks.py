"""The signals that request stacks are answered while a process is watched, and harmless before and after."""

import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
from torch.futures import Future

from trainer import accelerator, non_finite, step, step_vote
from trainer.failures import stacks as watched
from trainer.failures.stacks import STACK_SIGNAL, StackReader, Stacks, ask, frames_of, waits


def test_a_process_that_starts_or_exits_is_not_killed_by_a_request() -> None:
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
    while "test_a_process_that_starts_or_exits" not in reader.read():
        assert time.monotonic() < deadline
    reader.close()


def test_only_the_main_thread_answers() -> None:
    """Other threads keep running: one in a thousand walks of their frames crashed."""
    stacks, over = Stacks(), threading.Event()
    stacks.open(crashes=False)
    other = threading.Thread(target=over.wait, name="other")
    other.start()
    reader = StackReader(os.getpid(), stacks.fd)
    (text,) = ask([(os.getpid(), reader)], timeout_s=100.0)
    assert text.count("most recent call first") == 1 and "test_only_the_main_thread_answers" in text
    crash = f'{text}Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  File "a", line 1 in b\n\n'
    crash += 'Current thread 0x2 (most recent call first):\n  File "c", line 2 in d\n'
    assert frames_of(crash) == [("c", "2", "d")]
    over.set()
    other.join()
    stacks.close()
    reader.close()


def test_a_crash_is_found_after_thousands_of_answers() -> None:
    stacks = Stacks()
    answer = "Stack of process 1 (most recent call first):\n" + '  File "a", line 1 in b\n' * 100 + "\n"
    os.write(stacks.fd, answer.encode() * 1000)
    os.write(
        stacks.fd,
        b'Fatal Python error: Aborted\n\nCurrent thread 0x2 (most recent call first):\n  File "c", line 2 in d\n',
    )
    reader = StackReader(os.getpid(), stacks.fd)
    assert reader.size() > 2 << 20
    assert frames_of(reader.read()) == [("c", "2", "d")]
    reader.close()


@pytest.mark.parametrize("is_in_python", [True, False])
def test_only_a_process_that_is_in_c_code_gets_the_signal_that_c_code_answers(is_in_python: bool) -> None:
    """If the main thread executes Python, the handler may walk a frame that is being freed, and crash."""
    stacks, (is_open, opened) = Stacks(), os.pipe()
    pid = os.fork()
    if not pid:
        stacks.open(crashes=False)
        if is_in_python:
            signal.signal(STACK_SIGNAL, signal.SIG_DFL)  # the signal would end this process
        os.write(opened, b"x")
        while is_in_python:
            exec("len('freed code')")
        Future().wait()
    os.close(opened)
    os.read(is_open, 1)
    reader = StackReader(pid, stacks.fd)
    try:
        deadline, text = time.monotonic() + 100, ""
        while not text or waits(frames_of(text)) == is_in_python:  # it may not be waiting yet
            assert time.monotonic() < deadline
            (text,) = ask([(pid, reader)], timeout_s=100 if is_in_python else 0.4)
        assert "test_only_a_process_that" in text
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.close(is_open)
    reader.close()


def test_a_wait_for_a_communication_thread_is_a_wait_for_other_ranks() -> None:
    """Otherwise, all ranks that wait in a schedule of FSDP would count as busy, like the rank that hangs."""
    moved: Future[None] = Future()
    thread = threading.Thread(target=moved.wait)
    thread.start()
    deadline = time.monotonic() + 100
    frames: list[tuple[str, str, str]] = []
    while not (frames and frames[0][2] == "wait" and "torch" in frames[0][0]):
        assert time.monotonic() < deadline, frames
        stack = traceback.extract_stack(sys._current_frames()[thread.ident])  # type: ignore[index]
        frames = [(frame.filename, str(frame.lineno), frame.name) for frame in reversed(stack)]
    moved.set_result(None)
    thread.join()
    assert waits(frames)


SEAM = (accelerator.__file__, "130", "read")


@pytest.mark.parametrize("file", [step_vote.__file__, non_finite.__file__])
@pytest.mark.parametrize(
    "inner",
    [[], [(threading.__file__, "7", "wait")], [(torch.cuda.streams.__file__, "7", "synchronize")], [SEAM]],
)
def test_a_wait_for_all_ranks_in_a_step_is_detected(file: str, inner: list[tuple[str, str, str]]) -> None:
    """On CPUs in torch's C++ code, which has no frame; on a GPU for an event that all ranks must reach."""
    caller = [(step.__file__, "63", "train_step")]
    assert waits([*inner, (file, "85", "finish"), *caller])
    assert not waits([*inner, *caller])


def test_the_waiting_modules_exist() -> None:
    """A module that was renamed would count as busy."""
    homes = {"torch": Path(torch.__file__).parents[1], "trainer": Path(watched.__file__).parents[2]}
    for name in (*watched._WAITS, *watched._CALLED):
        path = homes[name.split("/")[1]] / name[1:]
        assert path.exists(), path
