"""What can end a run early, and the exit status each leaves behind.

Any other exception is a fault: Python's own status 1, with its traceback.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class RunEndError(Exception):
    """An end that needs no traceback: its message says it all, and is printed once.

    Attributes:
        ranks: whom it is about, where it is about some and raised by all.
    """

    exit_code: int

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class UserError(RunEndError, ValueError):
    """A mistake that the person at the keyboard can mend: name the value, the limit and the way out."""

    exit_code = 2


class NonFiniteLossError(RunEndError, ArithmeticError):
    """The loss or a gradient was NaN or Inf on some rank, and no update was made of that gradient; or a
    number that was to be saved was, and nothing of that step was saved.
    """

    exit_code = 3


class ReplicasDifferError(RunEndError):
    """Ranks that must hold the same bits do not; nothing was saved after the last time they did.

    `ranks` are those that differ from the majority of their replicas; empty where there is no majority.
    """

    exit_code = 1


class StoppedBySignal(RunEndError):  # noqa: N818, it is no error
    """A signal asked for a stop; the run was saved at `step`, or had not begun (None), and can be resumed.

    The exit status is 75, EX_TEMPFAIL of sysexits.h, "try again later": a job script can requeue on it, and
    cannot take it for a crash (1), a mistake (2) or a kill that saved nothing (128 + signal number).
    """

    exit_code = 75

    def __init__(self, step: int | None) -> None:
        super().__init__(
            "stopped by a signal before all ranks had met: no step was made"
            if step is None
            else f"stopped by a signal after step {step}; resume=auto goes on from there"
        )
        self.step = step


@contextmanager
def writing(run_dir: Path | str) -> Iterator[None]:
    """What the disk says while a run writes its own files, full, read-only or gone, is one message.

    Raises:
        UserError: for an OSError.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"run_dir={run_dir} cannot be written: {error}") from error


class EndedBefore(RunEndError):  # noqa: N818, it is no error
    """torchrun has restarted a launch that came to an end which a restart cannot help: the same end again."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = status


def first_line(error: BaseException | str) -> str:
    """The first line of what an error says, or its class's name if it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def in_a_line(error: BaseException) -> str:
    """The name of its class, and the first line of what it says."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"
