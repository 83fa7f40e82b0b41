"""What can end a run early, and the exit status each leaves behind.

Any other exception is a fault: Python's own status 1, with its traceback.
"""


class RunEndError(Exception):
    """An end that needs no traceback: its message says it all, and is printed once."""

    exit_code: int


class UserError(RunEndError, ValueError):
    """A mistake that the person at the keyboard can mend: name the value, the limit and the way out."""

    exit_code = 2


class NonFiniteLossError(RunEndError, ArithmeticError):
    """The loss was NaN or Inf on some rank; no rank applied that step's update."""

    exit_code = 3
