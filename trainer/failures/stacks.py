"""The Python stacks of a process, written by a signal handler in C, or by Python code in its main thread.

The handler needs no interpreter lock, so it works while the process is stuck. But it walks the main thread's
frames at any moment. While that thread executes Python, one walk in about 30,000 meets the code of a function
that is just being freed, which is a SIGSEGV. So a main thread is asked to answer in Python first. If it does
not within the time for it, it is most likely in C code, and its frames stay as they are.
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

from trainer.failures.processes import nameless_file, place_of

STACK_SIGNAL = signal.SIGUSR2  # answered by C code
_QUESTION = signal.SIGURG  # answered by Python code; by default a process ignores it
_HEADERS = re.compile(r"^(?=Stack |Thread 0x|Current thread )", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+|\?\?\?) in (.+)$', re.MULTILINE)
_ROOT = str(Path(__file__).parents[1]) + os.sep
_MOST_BYTES = 1 << 20  # read at once
_INSTALLED = {"site-packages", "dist-packages"}  # in any of several environments
# Their frames wait for what their caller has launched.
_CALLED = ("/torch/cuda/", "/torch/accelerator/", "/trainer/accelerator.py")
# A thread in one of these modules waits for another rank, or for the results of a backward pass.
_WAITS = (
    *("/torch/distributed/", "/torch/autograd/", "/torch/futures/"),
    *("/trainer/step_vote.py", "/trainer/comm/", "/trainer/distributed/process_group.py"),
    *("/trainer/distributed/links.py", "/trainer/distributed/rendezvous.py"),
    "/trainer/non_finite.py",  # on a GPU, for what the all-reduce of gradients gives
)

Frame = tuple[str, str, str]  # file, line, function
_asking = threading.Lock()


class Stacks:
    """The memory for this process's stacks, which neighbours can open, and keep when it is dead.

    Answers `ask`, also in processes forked from this one; a fatal signal writes the stack too.
    """

    def __init__(self) -> None:
        self._file = os.fdopen(nameless_file("ringmaster-stacks"), "r+b", buffering=0)
        self.fd = self._file.fileno()
        self._crashes = False
        # A neighbour may ask before `open`, and during this process's exit: the signal must not kill it.
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)

    def open(self, crashes: bool) -> None:
        """Start to answer; `crashes`: a fatal error's stack is written here, too, not to stderr."""
        self._crashes = crashes and not faulthandler.is_enabled()
        if self._crashes:
            faulthandler.enable(self._file, all_threads=True)
        # Only the main thread: others continue meanwhile, and walking their frames may end in SIGSEGV.
        faulthandler.register(STACK_SIGNAL, self._file, all_threads=False)
        self._before = signal.signal(_QUESTION, self._answer)
        signal.siginterrupt(_QUESTION, False)  # as faulthandler's: system calls of users' C code go on

    def _answer(self, number: int, frame: FrameType | None) -> None:
        """Write the main thread's stack, in faulthandler's words.

        With the pid: an answer may come late, when another process that writes to the same file was asked.
        """
        with contextlib.suppress(Exception):  # it runs within users' code
            lines = (
                f'  File "{at.f_code.co_filename}", line {line or "???"} in {at.f_code.co_name}\n'
                for at, line in traceback.walk_stack(frame)
            )
            text = "".join([f"\nStack of process {os.getpid()} (most recent call first):\n", *lines])
            os.write(self.fd, text.encode(errors="backslashreplace"))

    def close(self) -> None:
        signal.signal(_QUESTION, self._before or signal.SIG_DFL)
        faulthandler.unregister(STACK_SIGNAL)
        if self._crashes:
            faulthandler.disable()


class StackReader:
    """Reads the `Stacks` of another process of this host, or of this one."""

    def __init__(self, pid: int, fd: int) -> None:
        self._fd = os.open(place_of(pid, fd), os.O_RDONLY)

    def read(self, begin: int | None = None) -> str:
        """Up to 1 MiB from `begin` on; None: the last MiB, since the file grows with each answer."""
        begin = max(0, self.size() - _MOST_BYTES) if begin is None else begin
        return os.pread(self._fd, _MOST_BYTES, begin).decode(errors="replace")

    def close(self) -> None:
        os.close(self._fd)

    def size(self) -> int:
        return os.fstat(self._fd).st_size


def ask(readers: Sequence[tuple[int, StackReader]], timeout_s: float = 0.4) -> list[str]:
    """Have each process, by pid, write its main thread's stack now, and return them; "" without an answer.

    A rank and its data workers write to one file, so processes of a rank are asked one at a time.

    Args:
        timeout_s: for the answers in Python, and once more for those in C.
    """
    with _asking:
        texts = _ask(readers, _QUESTION, timeout_s)
        silent = [(pid, reader) for pid, reader in readers if not texts.get(pid)]
        texts |= _ask(silent, STACK_SIGNAL, timeout_s)
    return [texts[pid] for pid, _ in readers]


def _ask(readers: Sequence[tuple[int, StackReader]], number: int, timeout_s: float) -> dict[int, str]:
    """By pid, what each process has answered to the signal `number`, until all have, or the time is over."""
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
            header = f"Stack of process {pid} " if number == _QUESTION else "Stack ("
            parts = _HEADERS.split(reader.read(begins[pid]))
            texts[pid] = next((part for part in parts if part.startswith(header)), "")
        if all(texts.values()) and texts == before:  # no process is still writing
            break
    return texts


def frames_of(text: str, of_worker: bool = False) -> list[Frame]:
    """The frames of the main thread in the last answer, innermost first; after a crash, its thread's.

    Args:
        of_worker: in the last stacks that a data worker wrote; its rank may have written some, too.
    """
    _, crash, after = text.rpartition("Fatal Python")
    text = after if crash else text
    threads = _HEADERS.split(text)
    if of_worker:
        threads = [thread for thread in threads if " in _worker_loop\n" in thread] or [""]
    # The kernel delivers a signal to the main thread if it can; in a crash that is written last.
    asked = "Current" if crash else "Stack "
    chosen = [each for each in threads if each.startswith(asked) and _FRAME.search(each)] or threads
    return [(file, line, function) for file, line, function in _FRAME.findall(chosen[-1])]


def frames_of_exception(error: BaseException) -> list[Frame]:
    summary = traceback.extract_tb(error.__traceback__)
    return [(frame.filename, str(frame.lineno), frame.name) for frame in reversed(summary)]


def where(frames: Sequence[Frame]) -> str | None:
    """The innermost frame of the user's own code; else of this trainer's; else the innermost."""
    users = [frame for frame in frames if not _is_others(frame[0]) and not frame[0].startswith(_ROOT)]
    ours = [frame for frame in frames if frame[0].startswith(_ROOT)]
    # train.py, a test and the like call the trainer: their frames are the outermost, and are skipped.
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
    """Whether the innermost relevant frame waits for other ranks."""
    for file, _, _ in frames:
        is_librarys = _is_others(file) and "torch" not in Path(file).parts and not file.startswith(_ROOT)
        if is_librarys or any(path in file for path in _CALLED):
            continue
        return any(path in file for path in _WAITS)
    return False


def _is_others(file: str) -> bool:
    in_library = file.startswith(sysconfig.get_path("stdlib") + os.sep)
    return file.startswith("<") or in_library or not _INSTALLED.isdisjoint(Path(file).parts)
