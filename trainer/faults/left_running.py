"""Names, and then ends, threads and processes of user code that keep the process from exiting."""

import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

from trainer.faults import exit_report, stacks

_NAMED_S, _ENDED_S = 5.0, 30.0  # after the program has ended


@contextmanager
def ends_in_time() -> Iterator[None]:
    """Around a whole program: it exits with its own status, even if user code has left something running.

    At exit Python waits for threads and child processes that are not daemons, and a launcher waits for
    Python. They get some time, since one may still be sending a file, and then end with the process.
    """
    status = 1
    try:
        yield
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        threading.Thread(target=_see_to_the_end, args=(status,), name="end", daemon=True).start()


def _see_to_the_end(status: int) -> None:
    threading.main_thread().join()
    ended = time.monotonic()
    time.sleep(_NAMED_S)
    if not (left := _left()):
        return  # Python's own exit may take long
    words = ", ".join(
        f"process {one.name} (pid {one.pid})"
        if isinstance(one, BaseProcess)
        else f"thread {one.name} ({_where(one)})"
        for one in left
    )
    exit_report.print_line(
        f"[rank {os.environ.get('RANK', 0)}] the program has ended, with status {status}, but not {words}; "
        f"what still runs {_ENDED_S:.0f} s after the end is ended, too. Join it before, in a logger's close "
        "for example, or start it with daemon=True"
    )
    while time.monotonic() - ended < _ENDED_S:
        time.sleep(0.1)
        if not _left():
            return
    for one in _left():
        if isinstance(one, BaseProcess):
            one.kill()
    exit_report.leave(status)


def _left() -> list[threading.Thread | BaseProcess]:
    """The threads and processes that Python waits for."""
    threads = [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
    return [*threads, *(one for one in multiprocessing.active_children() if not one.daemon)]


def _where(thread: threading.Thread) -> str | None:
    frame = sys._current_frames().get(thread.ident or 0)
    summary = traceback.extract_stack(frame) if frame is not None else []
    return stacks.where([(line.filename, str(line.lineno), line.name) for line in reversed(summary)])
