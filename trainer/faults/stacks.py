"""The Python stacks of a process, taken by a signal that is answered in C, whoever holds the interpreter."""

import contextlib
import faulthandler
import os
import re
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from trainer.faults import uncaught

STACK_SIGNAL = signal.SIGUSR2
_FRAME = re.compile(r'^  File "(.+)", line (\d+|\?\?\?) in (.+)$', re.MULTILINE)
_ROOT = str(Path(__file__).parents[1]) + os.sep
_INSTALLED = {"site-packages", "dist-packages"}  # in whichever of several environments
# Whoever is in one of these waits for another rank, or for what a backward pass hands on to them.
_WAITS: tuple[tuple[str, ...], ...] = (
    ("torch", "distributed"),
    ("torch", "autograd"),
    ("torch", "futures"),
    ("trainer", "training", "step_agreement.py"),
    ("trainer", "comm"),
    ("trainer", "distributed", "process_group.py"),
    ("trainer", "checkpoint", "agreement.py"),
)
# The watch and whom it asks to wait look the same in every process: they tell nothing.
_OWN = ("trainer", "faults", "watch.py")

Frame = tuple[str, str, str]  # file, line, function
_asking = threading.Lock()


class Stacks:
    """Where this process's stacks go: memory that neighbours can open, and keep when we are dead.

    Answers STACK_SIGNAL, also in processes forked from this one; a fatal signal leaves the stack too, and
    before it a C++ exception its words.
    """

    def __init__(self) -> None:
        self._file: BinaryIO
        self._size = 0
        if hasattr(os, "memfd_create"):
            self._file = os.fdopen(os.memfd_create("ringmaster-stacks"), "r+b", buffering=0)
        else:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115, it stays open
        self.fd = self._file.fileno()
        self._crashes = False
        # A neighbour that was introduced to this process may ask before `open`, and while it is on its way
        # out: it must not kill it.
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)

    def open(self, crashes: bool) -> None:
        """Begin to answer; `crashes`: a fatal error's stack goes here too, and not to stderr."""
        self._crashes = crashes and not faulthandler.is_enabled()
        if self._crashes:
            faulthandler.enable(self._file, all_threads=True)
            self._undo = uncaught.tell(self.fd)
        # Of the main thread alone: others go on meanwhile, and to walk their frames may end in SIGSEGV.
        faulthandler.register(STACK_SIGNAL, self._file, all_threads=False)

    def add_other_threads(self) -> None:
        """Add the stacks of all threads where the main thread's was asked for.

        Called now and then: who calls holds the interpreter, so that no thread changes its frames meanwhile.
        """
        if os.fstat(self.fd).st_size != self._size:
            faulthandler.dump_traceback(self._file, all_threads=True)
            self._size = os.fstat(self.fd).st_size

    def close(self) -> None:
        faulthandler.unregister(STACK_SIGNAL)
        if self._crashes:
            faulthandler.disable()
            self._undo()


class StackReader:
    """Reads what another process of this host, or this one, has written into its `Stacks`."""

    def __init__(self, pid: int, fd: int) -> None:
        self._fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)

    def read(self, begin: int = 0) -> str:
        return os.pread(self._fd, 1 << 20, begin).decode(errors="replace")

    def close(self) -> None:
        os.close(self._fd)

    def size(self) -> int:
        return os.fstat(self._fd).st_size


def ask(readers: Sequence[tuple[int, StackReader]], timeout_s: float = 0.4) -> list[str]:
    """Have each process, by pid, write its stacks now, and return them; empty where one does not answer.

    A rank and its data workers write into one file: one question at a time.
    """
    with _asking:
        return _ask(readers, timeout_s)


def _ask(readers: Sequence[tuple[int, StackReader]], timeout_s: float) -> list[str]:
    begins = [reader.size() for _, reader in readers]
    for pid, _ in readers:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, STACK_SIGNAL)
    deadline = time.monotonic() + timeout_s
    texts = [""] * len(readers)
    while time.monotonic() < deadline:
        time.sleep(0.02)
        before, texts = texts, [reader.read(at) for (_, reader), at in zip(readers, begins, strict=True)]
        if all(texts) and texts == before:  # nobody is still writing
            break
    return texts


def frames_of(text: str, of_worker: bool = False) -> list[Frame]:
    """The frames of the main thread in the last answer, innermost first; after a crash, its thread's.

    Args:
        of_worker: in the last that a data worker wrote; its rank may have been asked by somebody else, too.
    """
    _, crash, after = text.rpartition("Fatal Python")
    text = uncaught.without_handler(after) if crash else text
    threads = re.split(r"^(?=Stack |Thread 0x|Current thread )", text, flags=re.MULTILINE)
    if of_worker:
        threads = [thread for thread in threads if " in _worker_loop\n" in thread] or [""]
    # The kernel gives a signal to the main thread, if it can; in a crash that is written last.
    asked = "Current" if crash else "Stack "
    chosen = [each for each in threads if each.startswith(asked) and _FRAME.search(each)] or threads
    return [(file, line, function) for file, line, function in _FRAME.findall(chosen[-1])]


def frames_of_exception(error: BaseException) -> list[Frame]:
    summary = traceback.extract_tb(error.__traceback__)
    return [(frame.filename, str(frame.lineno), frame.name) for frame in reversed(summary)]


def where(frames: Sequence[Frame]) -> str | None:
    """The innermost frame of the user's own code; else of this trainer's; else of anybody's."""
    users = [frame for frame in frames if not _is_others(frame[0]) and not frame[0].startswith(_ROOT)]
    ours = [frame for frame in frames if frame[0].startswith(_ROOT) and not _within(frame[0], _OWN)]
    # train.py, a test and the like call the trainer: they are the outermost frames, and tell nothing.
    if users and ours and frames.index(users[0]) > frames.index(ours[0]):
        users = []
    for chosen in (users, ours, frames):
        if chosen:
            file, line, function = chosen[0]
            with contextlib.suppress(ValueError):
                file = str(Path(file).relative_to(Path.cwd()))
            return f"{file}:{line} in {function}"
    return None


def waits(frames: Sequence[Frame]) -> bool:
    """Whether the innermost frame with something to tell is one that waits for other ranks."""
    for file, _, _ in frames:
        if _within(file, _OWN) or (file.startswith(sys.prefix) and "torch" not in Path(file).parts):
            continue
        return any(_within(file, parts) for parts in _WAITS)
    return False


def _within(file: str, parts: tuple[str, ...]) -> bool:
    of_file = Path(file).parts
    return any(of_file[at : at + len(parts)] == parts for at in range(len(of_file)))


def _is_others(file: str) -> bool:
    in_library = file.startswith(sysconfig.get_path("stdlib") + os.sep)
    return file.startswith("<") or in_library or not _INSTALLED.isdisjoint(Path(file).parts)
