"""How a process of a run ends: messages, exit codes."""

import contextlib
import ctypes
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from trainer.config.overrides import in_words
from trainer.errors import EndedBefore, NonFiniteLossError, RunEndError, StoppedBySignal, UserError
from trainer.files.untrusted import Fields, load_json
from trainer.launch.fresh import launched_by
from trainer.launch.place import place, told_rank

_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
_FINAL = {error.exit_code for error in (UserError, NonFiniteLossError, StoppedBySignal)}


@contextmanager
def exits() -> Iterator[None]:
    """Turn exceptions into what a person and torchrun see.

    A `RunEndError` becomes its message and exit code; HYDRA_FULL_ERROR=1 shows its traceback too. Any other
    exception keeps its traceback, and torchrun is told of it as the root cause.
    """
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    try:
        _end_with_the_launcher()
        _end_as_before()
        yield
    except (RunEndError, HydraException, OmegaConfBaseException) as error:
        message = str(error) if isinstance(error, RunEndError) else in_words(error)
        status = getattr(error, "exit_code", UserError.exit_code)
        # Before all had met, torchrun may have asked: some other rank died, and it is about to restart.
        if not (isinstance(error, StoppedBySignal) and error.step is None):
            _tell_next_attempt(status, message)
        if wants_traceback:
            raise
        if not (isinstance(error, StoppedBySignal) and told_rank()):  # rank 0 says the same
            _say_once(message)
        sys.exit(status)
    except Exception as error:
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

            ErrorHandler().record_exception(error)
        raise


def _end_with_the_launcher() -> None:
    """Die with torchrun until the run takes over (see StopRequest): there is nothing to save."""
    if place().under_torchrun and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_as_before() -> None:
    """torchrun restarts after any end; one that a restart cannot help comes again at once, as it was."""
    word, restarts = _last_word(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if word is not None and restarts:
        word = word.parents[1] / f"attempt_{restarts - 1}" / word.name
        with contextlib.suppress(OSError, UserError):
            end = Fields(str(word), load_json(word))
            raise EndedBefore(end.count("status"), end.text("message"))


def _tell_next_attempt(status: int, message: str) -> None:
    word = _last_word()
    if word is not None and status in _FINAL:
        with contextlib.suppress(OSError):
            own = word.with_name(f"{word.name}.{os.getpid()}")
            own.write_text(json.dumps({"status": status, "message": message}))
            own.replace(word)


def _last_word() -> Path | None:
    """The file in which this attempt's ranks on this host tell how it ended for good.

    It lies in the directory that torchrun has for the attempt, and makes anew when it stops all ranks only to
    start them again, as hosts come or go; other launchers do not restart such ends.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parents[1] / "ringmaster_end.json" if error_file is not None else None


def refuse_sweep_in_ranks() -> None:
    """A sweep inside ranks would run on every one of them at once; each trial must be a launch of its own."""
    if place().among_ranks:
        raise UserError(
            f"-m (multirun) inside {place().launcher or 'ranks'} starts every trial on every rank; sweep "
            "outside, where each trial is a launch of its own: python train.py -m optim.lr=0.1,0.01 "
            "launch=local launch.processes=2"
        )


def _say_once(message: str) -> None:
    """Print for all ranks: rank 0 at once; another only if rank 0 then lives on, and so had nothing to say.

    torchrun and launch=local end the other ranks as soon as rank 0 has left.
    """
    rank = told_rank()
    if rank:
        time.sleep(10 if launched_by() == "local" else 3)  # a slow exit of rank 0 costs nothing there
    if _said_on_this_host(message):
        return
    print(f"[rank {rank}] {message}" if rank else message, file=sys.stderr, flush=True)


def _said_on_this_host(message: str) -> bool:
    """Whether another rank has said the same, as one does that rank 0, on a slow machine, comes after.

    Beside its ranks' error files torchrun has a directory for each attempt, gone when it ends; no other
    launcher has.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file is None:
        return False
    mark = Path(error_file).parents[1] / f"said_{hashlib.sha256(message.encode()).hexdigest()[:16]}"
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return True
    except OSError:  # then rather twice than not at all
        return False
    return False
