"""What can end a run early, and the exit status each leaves behind."""


class UserError(ValueError):
    """A mistake that the person at the keyboard can mend.

    Printed as one message, without a traceback: name the value, the limit and the way out.
    """

    exit_code = 2


class NonFiniteLossError(ArithmeticError):
    """The loss was NaN or Inf on some rank; no rank applied that step's update."""

    exit_code = 3
