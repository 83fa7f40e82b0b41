"""How a data worker begins: known to the watch, deaf to a session's signals, never outliving its parent."""

import contextlib
import ctypes
import multiprocessing.util
import os
import signal
import tempfile
import threading

from trainer.faults.heartbeat import Heartbeat

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
_LONGEST_TMPDIR = 70  # the path of a socket holds 107 characters, and multiprocessing adds 32


def begin_worker(heartbeat: Heartbeat, first: int, worker_id: int) -> None:
    heartbeat.become_worker(first + worker_id)
    _obey_the_main_process_alone()


def keep_sockets_short() -> None:
    """Have multiprocessing make its sockets in /tmp where TMPDIR is too long for them.

    Called before workers are forked: each hands over its batches through a socket, and would wait for ever.
    """
    if len(tempfile.gettempdir()) > _LONGEST_TMPDIR:
        before, tempfile.tempdir = tempfile.tempdir, "/tmp"
        with contextlib.suppress(OSError):
            multiprocessing.util.get_temp_dir()  # once for this process and those that it forks
        tempfile.tempdir = before


def _obey_the_main_process_alone() -> None:
    """Let a worker outlive the signals that stop a whole session, but not its main process.

    The main process may still want batches on its way to a checkpoint. A SIGTERM from it, which is how
    DataLoader ends a worker that does not answer, counts; should it be killed, the kernel kills the worker,
    also one that is stuck. (Workers are forked from the main thread: the kernel watches that thread.)
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_the_main_process_says_so, daemon=True).start()


def _end_when_the_main_process_says_so() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
