"""How a process of a run ends: messages, exit codes."""

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

from trainer.config.overrides import in_words
from trainer.errors import (
    NonFiniteError,
    RunEndError,
    StoppedBySignal,
    UserError,
    tell_torchrun,
    which_try,
)
from trainer.files import failure_file
from trainer.files.untrusted import load_json
from trainer.launch.rank_info import rank_from_environment, rank_info
from trainer.launch.signals import signal_at_parents_death
from trainer.troubleshooting import see

PAUSES_S = (2, 10, 30)  # before the first restart after a fault, the second, and each further one
_FINAL = {error.exit_code for error in (UserError, NonFiniteError, StoppedBySignal)}
_said: list[socket.socket] = []  # names for what this process has said, as long as it lives


@contextmanager
def ends_its_threads() -> Iterator[None]:
    """Around a whole program: a thread of user code that is no daemon does not keep the process after it.

    Python would wait for that thread, and a launcher for Python. Without such a thread the process ends as
    Python does, so that a profiler, a debugger or a caller in this process sees its end.
    """
    try:
        yield
    finally:
        main = threading.main_thread()
        others = [each for each in threading.enumerate() if not each.daemon and each is not main]
        left = [each for each in others if not _waits_for_work(each)]
        if left:
            _leave(sys.exc_info()[1], left)


def _waits_for_work(thread: threading.Thread) -> bool:
    """Return whether the thread is idle in a ThreadPoolExecutor, whose threads Python ends by itself."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None or frame.f_back is None or frame.f_globals["__name__"] != "concurrent.futures.thread":
        return False
    return frame.f_back.f_code is threading.Thread.run.__code__  # else it runs what was submitted


def _leave(error: BaseException | None, left: Sequence[threading.Thread]) -> None:
    """End this process with what Python does at its end, but without waiting for the threads `left`."""
    status = 0 if error is None else 1
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
    names = " and ".join(f"thread {thread.name}" for thread in left)
    print(
        f"[rank {rank_from_environment()}] {names} is still running and ends with the program; join it "
        "earlier, for example in a logger's close(), or start it with daemon=True",
        file=sys.stderr,
    )
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):  # a reader may have died
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


@contextmanager
def exits() -> Iterator[None]:
    """Turn exceptions into messages and exit codes.

    A `RunEndError` becomes its message and exit code; HYDRA_FULL_ERROR=1 shows its traceback too. Any other
    exception keeps its traceback, and is recorded for torchrun as the root cause.
    """
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    try:
        if rank_info().under_torchrun:
            signal_at_parents_death()  # until StopRequest takes over: there is nothing to save yet
        _end_as_before()
        yield
    except (RunEndError, HydraException, OmegaConfBaseException) as error:
        message = str(error) if isinstance(error, RunEndError) else in_words(error)
        status = getattr(error, "exit_code", UserError.exit_code)
        # Before the ranks have met, the stop may be torchrun's, which is about to restart after a death.
        if not (isinstance(error, StoppedBySignal) and error.step is None):
            failure_file.report_to_launcher(status, message)
        if not isinstance(error, StoppedBySignal):  # perhaps by torchrun, because of another rank
            tell_torchrun(message)
        if wants_traceback:
            raise
        if not (isinstance(error, StoppedBySignal) and rank_from_environment()):  # rank 0 says the same
            _say_once(message + (which_try() if status not in _FINAL else "") + see(message))
        sys.exit(status)
    except Exception as error:
        failure_file.report_to_launcher(1, str(error))
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

            ErrorHandler().record_exception(error)
        raise


def _end_as_before() -> None:
    """Raise the error of the attempt before if a restart cannot help: torchrun restarts after any error.

    After a fault, wait: the disk or the store that failed needs a moment.
    """
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
    """A sweep inside ranks would run on all of them at once; each trial must be its own launch."""
    if rank_info().among_ranks:
        raise UserError(
            f"-m (multirun) inside {rank_info().launcher or 'ranks'} starts every trial on every rank; sweep "
            "outside, where each trial is its own launch: python train.py -m optim.lr=0.1,0.01 "
            "launch=local launch.processes=2"
        )


def _say_once(message: str) -> None:
    """Print one message for all ranks: rank 0 at once, another rank only if rank 0 has another end, or none.

    torchrun and launch=local end the other ranks as soon as rank 0 has exited, which may take it a while:
    until then it holds a name of the system's (of no file).
    """
    rank = rank_from_environment()
    if rank:
        time.sleep(3)  # a verdict ends it after 5
    launch = f"{os.getppid()} {os.environ.get('MASTER_PORT')}"  # its process, and where its ranks meet
    name = hashlib.sha256(f"{launch} {message}".encode(errors="replace")).hexdigest()[:32]
    _said.append(socket.socket(socket.AF_UNIX))
    try:
        _said[-1].bind(f"\0ringmaster-{name}")
    except OSError:
        if rank or os.environ.get("WORLD_SIZE", "1") != "1":
            return
        # A single process has no other rank: it is another run's, and each says why it ends.
    print(f"[rank {rank}] {message}" if rank else message, file=sys.stderr, flush=True)
