"""Start data workers, and pass on their errors.

A worker ignores signals to its session, exits when its parent exits, and sends exceptions to its parent.
"""

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

_MAX_TMPDIR = 70  # characters: a socket's path has at most 107, of which multiprocessing adds 32


class WorkerError(RuntimeError):
    """An exception from a data worker, to be raised in the main process; `where` is its location."""

    def __init__(self, message: str, stack: str, where: str | None) -> None:
        super().__init__(message, stack, where)
        self.where = where

    def __str__(self) -> str:
        return f"{self.args[0]}\n{self.args[1]}"


def result_or_error(read: Callable[[Any], Any], request: Any) -> Any:
    """Return the result of `read`, or an exception for the loader to raise in the main process.

    The exception is a UserError or, in a worker, a WorkerError. Raised in a worker, sys.exit would end it
    silently, and StopIteration would end the epoch.
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
        message, where = class_and_line(error), stacks.where(stacks.frames_of_exception(error))
        return WorkerError(
            f"a data worker raised {message}", "".join(traceback.format_exception(error)), where
        )


def init_worker(heartbeat: Heartbeat, first: int, worker_id: int) -> None:
    """Initialize a new worker; DataLoader's `worker_init_fn`."""
    heartbeat.become_worker(first + worker_id)
    _ignore_session_signals()


def shorten_socket_paths() -> None:
    """Make multiprocessing create sockets in /tmp if TMPDIR is too long; call before workers are forked."""
    if len(tempfile.gettempdir()) > _MAX_TMPDIR:
        before, tempfile.tempdir = tempfile.tempdir, "/tmp"
        with contextlib.suppress(OSError):
            multiprocessing.util.get_temp_dir()  # cached for this process and its forks
        tempfile.tempdir = before


def _ignore_session_signals() -> None:
    """Ignore signals that are sent to the whole session, but exit when the main process dies.

    The main process may still need batches before it saves a checkpoint. A worker obeys only a SIGTERM from
    the main process, which DataLoader sends to a worker that does not answer. If the main process is killed,
    the kernel kills the worker, even if it hangs.
    """
    signal_at_parents_death()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_exit_on_sigterm_of_parent, daemon=True).start()


def _exit_on_sigterm_of_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
