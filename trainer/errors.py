"""The errors that end a run early, and their exit statuses.

Any other exception ends the run with its traceback and status 1.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from errno import EACCES, EEXIST, EISDIR, ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR, EPERM, EROFS
from importlib import import_module
from pathlib import Path
from typing import Any


class RunEndError(Exception):
    """Base class of errors that are printed without a traceback.

    `ranks` are the ranks that caused the error; `facts` are further entries for failure.json.
    """

    exit_code: int

    def __init__(
        self, message: str, ranks: tuple[int, ...] = (), facts: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.ranks, self.facts = ranks, facts or {}


class UserError(RunEndError, ValueError):
    """An error that the user can fix. The message states the value, what is allowed and what to do."""

    exit_code = 2


class NoAccessError(UserError):
    """Missing permission to read or write a path."""


class RetryableError(RunEndError):
    """A failure of a disk, a network or a store that may be temporary, so that a restart may help."""

    exit_code = 1


class NonFiniteError(RunEndError, ArithmeticError):
    """A loss, a gradient or a value to be saved is NaN or Inf; it was not used in an update or saved."""

    exit_code = 3


class ReplicasDifferError(RunEndError):
    """Replicas that must be bit-identical differ; `ranks` differ from the majority, if there is one."""

    exit_code = 1


class WrongResultError(RunEndError):
    """A device computed a wrong result (`train.verify_every`), which no update used.

    A restart may help, in particular on another device.
    """

    exit_code = 76


class StoppedBySignal(RunEndError):  # noqa: N818, not an error
    """A signal stopped the run after `step`, which was saved, or before the first step (None).

    The exit status is 75 (EX_TEMPFAIL in sysexits.h, "try again later"), so that a job script can requeue the
    run.
    """

    exit_code = 75

    def __init__(self, step: int | None, run_dir: object = "DIR") -> None:
        super().__init__(
            "stopped by a signal before all ranks had joined; no step was run"
            if step is None
            else f"stopped by a signal after step {step}; to continue, set run_dir={run_dir} resume=auto"
        )
        self.step = step


def optional(package: str, setting: str, extra: str | None = None) -> Any:
    """Import a package that only `setting` requires. If missing, raise UserError with the pip command."""
    try:
        return import_module(package)
    except ImportError as error:
        raise UserError(
            f"{setting} requires the package {package} ({error}): pip install "
            f"'ringmaster-trainer[{extra or package}]'"
        ) from error


def without_internals(error: RunEndError) -> RunEndError:
    """Return the error without its internal traceback, and without a cause that has no user code."""
    if not _has_user_frames(error.__cause__):
        error.__cause__ = None
    return error.with_traceback(None)


def _has_user_frames(error: BaseException | None) -> bool:
    known = {"trainer", "hydra", "omegaconf", "torch", *sys.stdlib_module_names}
    while error is not None:
        frames = traceback.walk_tb(error.__traceback__)
        if any(frame.f_globals.get("__name__", "").partition(".")[0] not in known for frame, _ in frames):
            return True
        error = error.__cause__
    return False


_PERMANENT = {ENOENT, EACCES, EPERM, EROFS, EEXIST, EISDIR, ENOTDIR, ENAMETOOLONG, ELOOP}


def kind_of(error: BaseException) -> "type[UserError] | type[RetryableError]":
    """Return the class to raise for `error`: UserError if the user must fix it, otherwise RetryableError."""
    if isinstance(error, PermissionError | NoAccessError):
        return NoAccessError
    permanent = error.errno in _PERMANENT if isinstance(error, OSError) else isinstance(error, UserError)
    return UserError if permanent else RetryableError


def is_retryable(error: BaseException) -> bool:
    """Return whether a disk or network caused `error`. A library's OSError about bad data has no errno."""
    has_number = isinstance(error, OSError) and error.errno is not None
    return (has_number or isinstance(error, ConnectionError | TimeoutError)) and kind_of(
        error
    ) is RetryableError


@contextmanager
def writing(run_dir: Path | str) -> Iterator[None]:
    """Turn an OSError while writing to `run_dir` into a one-line error of the class from `kind_of`."""
    try:
        yield
    except OSError as error:
        raise kind_of(error)(f"run_dir={run_dir} cannot be written: {error}") from error


def report_to_torchrun(message: str, file: str | None = None, at: float | None = None) -> None:
    """Make torchrun show `message` as the root cause, unless the rank's error file already contains one.

    Args:
        file: the error file of the failed rank; by default, that of this rank.
        at: the time of the failure, by default now. A slightly earlier time is written, because torchrun
            shows the earliest failure.
    """
    path = file or os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None and not Path(path).exists():
        extra = {"py_callstack": message, "timestamp": str(int(time.time() if at is None else at) - 2)}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def attempt_note() -> str:
    """Return "; this was attempt N of M" under a torchrun that may restart the run, otherwise ""."""
    attempts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) + 1
    number = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) + 1
    return f"; this was attempt {number} of {attempts}" if attempts > 1 else ""


def first_few(items: Iterable[object], most: int = 5) -> str:
    """Return the first `most` items and the number of further items: "a, b (and 3 more)"."""
    words = [str(item) for item in items]
    return ", ".join(words[:most]) + (f" (and {len(words) - most} more)" if len(words) > most else "")


def few_lines(lines: list[str], most: int = 12) -> list[str]:
    """Return the first `most` lines, and a line with the number of further lines."""
    more = len(lines) - most
    return lines if more <= 0 else [*lines[:most], f"... and {more} more"]


def first_line(error: BaseException | str) -> str:
    """Return the first line of an error's message, or the name of its class if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def on_one_line(error: BaseException) -> str:
    """Return an error's message on one line, or the name of its class if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def class_and_line(error: BaseException) -> str:
    """Return the name of an error's class and the first line of its message."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"
