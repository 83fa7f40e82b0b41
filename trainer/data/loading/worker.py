"""How a data worker starts and fails: the watch knows it, it ignores signals to the session, it ends with
its parent, and its errors reach the parent."""

import contextlib
import multiprocessing.util
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info

from trainer.errors import UserError, class_and_line
from trainer.failures import stacks
from trainer.failures.heartbeat import Heartbeat
from trainer.launch.signals import signal_at_parents_death

_LONGEST_TMPDIR = 70  # the path of a socket holds 107 characters, and multiprocessing adds 32


class WorkerError(RuntimeError):
    """An exception of a data worker, as text; raised in the main process.

    Attributes:
        where: file, line and function in the worker.
    """

    def __init__(self, words: str, stack: str, where: str | None) -> None:
        super().__init__(words, stack, where)
        self.where = where

    def __str__(self) -> str:
        return f"{self.args[0]}\n{self.args[1]}"


def answer(read: Callable[[Any], Any], request: Any) -> Any:
    """The result of `read`, or an exception that the loader raises in the main process.

    The exception is a UserError or, in a worker, a WorkerError. torch silently ends a worker at sys.exit and
    an epoch at StopIteration.
    """
    in_worker = get_worker_info() is not None
    try:
        return read(request)
    except UserError as error:
        return error
    except BaseException as error:
        if not in_worker:
            if isinstance(error, StopIteration):
                raise RuntimeError("the dataset raised StopIteration") from error
            raise
        words, where = class_and_line(error), stacks.where(stacks.frames_of_exception(error))
        return WorkerError(f"a data worker raised {words}", "".join(traceback.format_exception(error)), where)


def begin_worker(heartbeat: Heartbeat, first: int, worker_id: int) -> None:
    heartbeat.become_worker(first + worker_id)
    _obey_the_main_process_alone()


def keep_sockets_short() -> None:
    """Have multiprocessing create its sockets in /tmp if the path of TMPDIR is too long for them.

    Called before workers are forked: each returns its batches through a socket, and would wait forever.
    """
    if len(tempfile.gettempdir()) > _LONGEST_TMPDIR:
        before, tempfile.tempdir = tempfile.tempdir, "/tmp"
        with contextlib.suppress(OSError):
            multiprocessing.util.get_temp_dir()  # cached for this process and its forks
        tempfile.tempdir = before


def _obey_the_main_process_alone() -> None:
    """Let a worker survive the signals that stop a whole session, but not its main process.

    The main process may still need batches before it saves a checkpoint. A SIGTERM from it still counts:
    DataLoader ends a worker that does not answer with it. If the main process is killed, the kernel kills the
    worker, even a stuck one. (Workers are forked from the main thread: the kernel watches that thread.)
    """
    signal_at_parents_death()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_the_main_process_says_so, daemon=True).start()


def _end_when_the_main_process_says_so() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
