"""The Python stacks of a process, written by a signal handler in C, or by Python code in its main thread.

The C handler does not need the interpreter lock, so it works while the process is stuck. But while the main
thread executes Python, about one in 30,000 walks of its frames reaches a function that is being freed, and
crashes with a SIGSEGV. Therefore, the main thread is asked to answer in Python first. If it does not answer
in time, it is most likely in C code, where its frames do not change.
"""

import contextlib
import faulthandler
import os
import re
import signal
import sysconfig
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from trainer.failures.processes import nameless_file, path_of_fd

STACK_SIGNAL = signal.SIGUSR2  # answered by C code
_PYTHON_SIGNAL = signal.SIGURG  # answered by Python code; processes ignore it by default
_HEADERS = re.compile(r"^(?=Stack |Thread 0x|Current thread )", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+|\?\?\?) in (.+)$', re.MULTILINE)
_ROOT = str(Path(__file__).parents[1]) + os.sep
_MOST_BYTES = 1 << 20  # read at once
_INSTALLED = {"site-packages", "dist-packages"}
# Functions in these modules wait for work that their caller has launched.
_CALLED = ("/torch/cuda/", "/torch/accelerator/", "/trainer/accelerator.py")
# A thread in one of these modules waits for another rank, or for the results of a backward pass.
_WAITS = (
    *("/torch/distributed/", "/torch/autograd/", "/torch/futures/"),
    *("/trainer/step_vote.py", "/trainer/comm/", "/trainer/distributed/process_group.py"),
    *("/trainer/distributed/links.py", "/trainer/distributed/rendezvous.py"),
    "/trainer/non_finite.py",  # on a GPU, it waits for the result of the all-reduce
)

Frame = tuple[str, str, str]  # file, line, function
_asking = threading.Lock()


class Stacks:
    """The stacks of this process, in memory that other processes can read even after its death."""

    def __init__(self) -> None:
        self._file = os.fdopen(nameless_file("ringmaster-stacks"), "r+b", buffering=0)
        self.fd = self._file.fileno()
        self._crashes = False
        # The signal may arrive before `open` or during the exit, and must not kill this process.
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)

    def open(self, crashes: bool) -> None:
        """Start answering requests for stacks.

        Args:
            crashes: whether to write stacks of fatal errors to this memory instead of to stderr.
        """
        self._crashes = crashes and not faulthandler.is_enabled()
        if self._crashes:
            faulthandler.enable(self._file, all_threads=True)
        # Only the main thread: other threads keep running, and walking their frames may crash.
        faulthandler.register(STACK_SIGNAL, self._file, all_threads=False)
        self._before = signal.signal(_PYTHON_SIGNAL, self._answer)
        signal.siginterrupt(_PYTHON_SIGNAL, False)  # don't interrupt system calls of the user's C code

    def _answer(self, number: int, frame: FrameType | None) -> None:
        """Write the main thread's stack in the format of faulthandler.

        The header contains the pid, because a rank and its data workers write to the same file, and an answer
        may arrive late.
        """
        with contextlib.suppress(Exception):  # this runs in the middle of user code
            lines = (
                f'  File "{at.f_code.co_filename}", line {line or "???"} in {at.f_code.co_name}\n'
                for at, line in traceback.walk_stack(frame)
            )
            text = "".join([f"\nStack of process {os.getpid()} (most recent call first):\n", *lines])
            os.write(self.fd, text.encode(errors="backslashreplace"))

    def close(self) -> None:
        signal.signal(_PYTHON_SIGNAL, self._before or signal.SIG_DFL)
        faulthandler.unregister(STACK_SIGNAL)
        if self._crashes:
            faulthandler.disable()


class StackReader:
    """Read access to the `Stacks` of another process on this host, or of this process."""

    def __init__(self, pid: int, fd: int) -> None:
        self._fd = os.open(path_of_fd(pid, fd), os.O_RDONLY)

    def read(self, begin: int | None = None) -> str:
        """Return up to 1 MiB of text, starting at byte `begin`, or the last MiB if that is None."""
        begin = max(0, self.size() - _MOST_BYTES) if begin is None else begin
        return os.pread(self._fd, _MOST_BYTES, begin).decode(errors="replace")

    def close(self) -> None:
        os.close(self._fd)

    def size(self) -> int:
        return os.fstat(self._fd).st_size


def ask(readers: Sequence[tuple[int, StackReader]], timeout_s: float = 0.4) -> list[str]:
    """Return the current stack of each process's main thread, or "" if a process does not answer.

    A rank and its data workers write to the same file, so pass at most one of them in a call.

    Args:
        readers: the pid of each process, and the reader of its stacks.
        timeout_s: seconds to wait for Python stacks, and then for the C stacks of processes that did not
            answer.
    """
    with _asking:
        texts = _ask(readers, _PYTHON_SIGNAL, timeout_s)
        silent = [(pid, reader) for pid, reader in readers if not texts.get(pid)]
        texts |= _ask(silent, STACK_SIGNAL, timeout_s)
    return [texts[pid] for pid, _ in readers]


def _ask(readers: Sequence[tuple[int, StackReader]], number: int, timeout_s: float) -> dict[int, str]:
    """Send signal `number` to each process; return the stacks that arrive within the timeout, by pid."""
    begins = {pid: reader.size() for pid, reader in readers}
    for pid in begins:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
    deadline = time.monotonic() + timeout_s
    texts = dict.fromkeys(begins, "")
    while readers and time.monotonic() < deadline:
        time.sleep(0.02)
        before, texts = texts, {}
        for pid, reader in readers:
            header = f"Stack of process {pid} " if number == _PYTHON_SIGNAL else "Stack ("
            parts = _HEADERS.split(reader.read(begins[pid]))
            texts[pid] = next((part for part in parts if part.startswith(header)), "")
        if all(texts.values()) and texts == before:  # no process is still writing
            break
    return texts


def frames_of(text: str, of_worker: bool = False) -> list[Frame]:
    """Return the frames of the main thread in the last answer, or of the crashed thread, innermost first.

    Args:
        of_worker: whether to use the last stacks of a data worker instead of those of its rank.
    """
    _, crash, after = text.rpartition("Fatal Python")
    text = after if crash else text
    threads = _HEADERS.split(text)
    if of_worker:
        threads = [thread for thread in threads if " in _worker_loop\n" in thread] or [""]
    # After a crash, the current thread is the crashed one; faulthandler writes the main thread last.
    header = "Current" if crash else "Stack "
    chosen = [each for each in threads if each.startswith(header) and _FRAME.search(each)] or threads
    return [(file, line, function) for file, line, function in _FRAME.findall(chosen[-1])]


def frames_of_exception(error: BaseException) -> list[Frame]:
    summary = traceback.extract_tb(error.__traceback__)
    return [(frame.filename, str(frame.lineno), frame.name) for frame in reversed(summary)]


def where(frames: Sequence[Frame]) -> str | None:
    """Return the location of the innermost frame of user code, or else the trainer, or else any code."""
    users = [frame for frame in frames if not _is_library(frame[0]) and not frame[0].startswith(_ROOT)]
    ours = [frame for frame in frames if frame[0].startswith(_ROOT)]
    # Skip train.py, a test or another caller of the trainer, whose frames are the outermost.
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
    """Return whether the innermost frame that matters is in code that waits for other ranks."""
    for file, _, _ in frames:
        is_other_library = (
            _is_library(file) and "torch" not in Path(file).parts and not file.startswith(_ROOT)
        )
        if is_other_library or any(path in file for path in _CALLED):
            continue
        return any(path in file for path in _WAITS)
    return False


def _is_library(file: str) -> bool:
    in_stdlib = file.startswith(sysconfig.get_path("stdlib") + os.sep)
    return file.startswith("<") or in_stdlib or not _INSTALLED.isdisjoint(Path(file).parts)
