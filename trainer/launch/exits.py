"""End a process of a run with a message and an exit code."""

import atexit
import contextlib
import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from trainer.config.overrides import explain
from trainer.errors import (
    NonFiniteError,
    RunEndError,
    StoppedBySignal,
    UserError,
    attempt_note,
    report_to_torchrun,
)
from trainer.files import failure_file
from trainer.files.untrusted import load_json
from trainer.launch.rank_info import rank_from_environment, rank_info
from trainer.launch.signals import signal_at_parents_death
from trainer.troubleshooting import see

PAUSES_S = (2, 10, 30)  # before the first restart after a failure, the second, and each further restart
_FINAL = {error.exit_code for error in (UserError, NonFiniteError, StoppedBySignal)}
_printed: list[socket.socket] = []  # one per message that this process has printed; see _print_once


@contextmanager
def ends_its_threads() -> Iterator[None]:
    """End the program even if non-daemon threads of user code are still running.

    Otherwise, Python would wait for these threads, and the launcher for Python. Without such threads, the
    process exits as usual, so that a profiler, a debugger or a caller in this process notices the exit.
    """
    try:
        yield
    finally:
        main = threading.main_thread()
        others = [each for each in threading.enumerate() if not each.daemon and each is not main]
        running = [each for each in others if not _is_idle_in_pool(each)]
        if running:
            _exit_without(running, sys.exc_info()[1])


def _is_idle_in_pool(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None or frame.f_back is None or frame.f_globals["__name__"] != "concurrent.futures.thread":
        return False
    return frame.f_back.f_code is threading.Thread.run.__code__  # otherwise it runs a submitted function


def _exit_without(running: Sequence[threading.Thread], error: BaseException | None) -> None:
    """Exit with the status that Python would use after `error`, without waiting for the `running` threads."""
    status = 0 if error is None else 1
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
    names = " and ".join(f"thread {thread.name}" for thread in running)
    print(
        f"[rank {rank_from_environment()}] the program ends without waiting for {names}; join threads "
        "earlier, for example in a logger's close(), or start them with daemon=True",
        file=sys.stderr,
    )
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):  # the reader of a pipe may be dead
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


@contextmanager
def exits() -> Iterator[None]:
    """Turn exceptions into messages and exit codes.

    A `RunEndError` becomes its message and exit code; HYDRA_FULL_ERROR=1 adds the traceback. Any other
    exception keeps its traceback and is recorded for torchrun as the root cause.
    """
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    try:
        if rank_info().under_torchrun:
            signal_at_parents_death()  # until StopRequest takes over: there is nothing to save yet
        _repeat_final_error()
        yield
    except (RunEndError, HydraException, OmegaConfBaseException) as error:
        message = str(error) if isinstance(error, RunEndError) else explain(error)
        status = getattr(error, "exit_code", UserError.exit_code)
        # Before the rendezvous, the stop may come from torchrun, which is about to restart after a failure.
        if not (isinstance(error, StoppedBySignal) and error.step is None):
            failure_file.report_to_launcher(status, message)
        if not isinstance(error, StoppedBySignal):  # torchrun itself may have stopped this rank
            report_to_torchrun(message)
        if wants_traceback:
            raise
        if not (isinstance(error, StoppedBySignal) and rank_from_environment()):  # rank 0 prints the same
            _print_once(message + (attempt_note() if status not in _FINAL else "") + see(message))
        sys.exit(status)
    except Exception as error:
        failure_file.report_to_launcher(1, str(error))
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

            ErrorHandler().record_exception(error)
        raise


def _repeat_final_error() -> None:
    """Raise the previous attempt's error if a restart cannot help, because torchrun always restarts."""
    file_of_end, restarts = failure_file.end_file(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if file_of_end is not None and restarts:
        file_of_end = file_of_end.parents[1] / f"attempt_{restarts - 1}" / file_of_end.name
        with contextlib.suppress(OSError, UserError):
            end = load_json(file_of_end)
            if end["status"] in _FINAL:
                error = RunEndError(end["message"])
                error.exit_code = end["status"]
                raise error
            time.sleep(PAUSES_S[min(restarts, len(PAUSES_S)) - 1])


def refuse_sweep_in_ranks() -> None:
    """Raise UserError if this process is one of several ranks, because each rank would run every trial."""
    if rank_info().among_ranks:
        raise UserError(
            f"-m (multirun) under {rank_info().launcher or 'a multi-process launch'} would start every trial "
            "on every rank; run the sweep in one process, which launches each trial separately: python "
            "train.py -m optim.lr=0.1,0.01 launch=local launch.processes=2"
        )


def _print_once(message: str) -> None:
    """Print a message that several ranks may have: rank 0 at once, another rank only if rank 0 doesn't.

    The first rank to print binds an abstract socket address derived from the message, and keeps it until it
    exits.
    """
    rank = rank_from_environment()
    if rank:
        time.sleep(3)  # the watch of another rank ends this process after 5 s
    launch = f"{os.getppid()} {os.environ.get('MASTER_PORT')}"  # unique to the launch on this host
    name = hashlib.sha256(f"{launch} {message}".encode(errors="replace")).hexdigest()[:32]
    _printed.append(socket.socket(socket.AF_UNIX))
    try:
        _printed[-1].bind(f"\0ringmaster-{name}")
    except OSError:
        if rank or os.environ.get("WORLD_SIZE", "1") != "1":
            return
        # A single process has no other ranks: another run has the same message, and each run prints it.
    print(f"[rank {rank}] {message}" if rank else message, file=sys.stderr, flush=True)
