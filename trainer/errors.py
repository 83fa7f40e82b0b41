"""What can end a run early, and the exit status each leaves behind.

Any other exception is a fault: Python's own status 1, with its traceback.
"""

import errno
import json
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any


class RunEndError(Exception):
    """An end that needs no traceback: its message is complete, and is printed once.

    Attributes:
        ranks: the ranks that it is about, if all raise it because of some.
    """

    exit_code: int

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class UserError(RunEndError, ValueError):
    """An error that the user can fix: its message has the value, the limit and the way out."""

    exit_code = 2


class NoAccessError(UserError):
    """There is no right to read or write something, so what is there is not known."""


class RetryableError(RunEndError):
    """A disk, a network or a store has failed, told in a line: it may pass, so a restart is tried."""

    exit_code = 1


class NonFiniteError(RunEndError, ArithmeticError):
    """The loss or a gradient was NaN or Inf on some rank, and no update was made with it. Or a value to be
    saved was, and nothing of that step was saved.
    """

    exit_code = 3


class ReplicasDifferError(RunEndError):
    """Ranks that must hold the same bits do not; nothing was saved since they last did.

    `ranks` are those that differ from the majority of their replicas; empty without a majority.
    """

    exit_code = 1


class StoppedBySignal(RunEndError):  # noqa: N818, not an error
    """A signal asked for a stop; the run was saved at `step`, or had not begun (None), and can be resumed.

    The exit status is 75, EX_TEMPFAIL of sysexits.h, "try again later": a job script can requeue on it, and
    can tell it from a crash (1), a user error (2) or a kill without a save (128 + signal number).
    """

    exit_code = 75

    def __init__(self, step: int | None, run_dir: object = "DIR") -> None:
        super().__init__(
            "stopped by a signal before all ranks had met: no step was made"
            if step is None
            else f"stopped by a signal after step {step}; run_dir={run_dir} resume=auto continues from there"
        )
        self.step = step


def optional(package: str, setting: str, extra: str | None = None) -> Any:
    """Import a package that only `setting` needs.

    Raises:
        UserError: it is not installed; `extra`, by default the one of its name, installs it.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise UserError(
            f"{setting} needs the package {package} ({error}): pip install "
            f"'ringmaster-trainer[{extra or package}]'"
        ) from error


def without_internals(error: RunEndError) -> RunEndError:
    """The same error without this project's frames: its message says all that they would.

    A cause stays only if it passed through a user's own class, whose line it shows.
    """
    if not _passes_through_others(error.__cause__):
        error.__cause__ = None
    return error.with_traceback(None)


def _passes_through_others(error: BaseException | None) -> bool:
    known = {"trainer", "hydra", "omegaconf", "torch", *sys.stdlib_module_names}
    while error is not None:
        frames = traceback.walk_tb(error.__traceback__)
        if any(frame.f_globals.get("__name__", "").partition(".")[0] not in known for frame, _ in frames):
            return True
        error = error.__cause__
    return False


_REFUSALS = {
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
}


def kind_of(error: BaseException) -> "type[UserError] | type[RetryableError]":
    """Return UserError if a person must change something before `error` can go away, else RetryableError.

    For an OSError that is a path or its rights.
    """
    if isinstance(error, PermissionError | NoAccessError):
        return NoAccessError
    refused = error.errno in _REFUSALS if isinstance(error, OSError) else isinstance(error, UserError)
    return UserError if refused else RetryableError


def is_retryable(error: BaseException) -> bool:
    """Whether a disk or a network failed: an OSError without a number is a library's, as of a bad image."""
    has_number = isinstance(error, OSError) and error.errno is not None
    return (has_number or isinstance(error, ConnectionError | TimeoutError)) and kind_of(
        error
    ) is RetryableError


@contextmanager
def writing(run_dir: Path | str) -> Iterator[None]:
    """Turn OSErrors of a run's own files (disk full, read-only or gone) into one message.

    Raises:
        UserError, RetryableError: for an OSError, as `kind_of` says.
    """
    try:
        yield
    except OSError as error:
        raise kind_of(error)(f"run_dir={run_dir} cannot be written: {error}") from error


def report_to_torchrun(message: str, file: str | None = None, at: float | None = None) -> None:
    """Have torchrun show `message` as the root cause, unless its file for a rank (this one's) has a reason.

    Of several ranks it shows the first to end, so this end has a time a little before `at` (now).
    """
    path = file or os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None and not Path(path).exists():
        told = {"py_callstack": message, "timestamp": str(int(time.time() if at is None else at) - 2)}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": told}}))


def attempt_note() -> str:
    """Which of its tries torchrun has made, to follow a message; empty if it makes only one."""
    tries = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) + 1
    number = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) + 1
    return f"; this was attempt {number} of {tries}" if tries > 1 else ""


def first_few(items: Iterable[object], most: int = 5) -> str:
    """The first `most` of the items, and how many more there are: "a, b (and 3 more)"."""
    words = [str(item) for item in items]
    return ", ".join(words[:most]) + (f" (and {len(words) - most} more)" if len(words) > most else "")


def few_lines(lines: list[str], most: int = 12) -> list[str]:
    """Return the first `most` lines, and a line with the number of the others."""
    more = len(lines) - most
    return lines if more <= 0 else [*lines[:most], f"... and {more} more"]


def first_line(error: BaseException | str) -> str:
    """The first line of an error's message, or the name of its class if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def on_one_line(error: BaseException) -> str:
    """All that an error says, on one line, or its class's name if it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def class_and_line(error: BaseException) -> str:
    """The name of its class, and the first line of its message."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"
