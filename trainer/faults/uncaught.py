"""The message of an uncaught C++ exception, such as gloo's, written where neighbours read stacks.

libstdc++ prints it to stderr, which no other process sees, and then aborts.
"""

import ctypes
import os
import re
from collections.abc import Callable

_HANDLER = ctypes.CFUNCTYPE(None)
_WORDS = re.compile(r"^  what\(\):\s+(?:\[[^]]*\]\s*)?(.+)", re.MULTILINE)  # gloo's start with [file:line]


def write_to(fd: int) -> Callable[[], None]:
    """Write such messages to `fd` from now on; the returned function undoes it. Needs libstdc++."""
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        set_terminate = library._ZSt13set_terminatePFvvE  # std::set_terminate
    except (OSError, AttributeError):
        return lambda: None
    set_terminate.restype, set_terminate.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def before_abort() -> None:
        os.dup2(fd, 2)
        its_own()  # prints, and aborts

    handler = _HANDLER(before_abort)
    address = set_terminate(ctypes.cast(handler, ctypes.c_void_p))
    its_own = _HANDLER(address)

    def undo() -> None:
        set_terminate(address)
        assert handler  # it must live as long as it may be called

    return undo


def message_in(text: str) -> str | None:
    """The message of the last exception in the text of a process that aborted."""
    found = _WORDS.findall(text)
    return found[-1] if found else None


def without_handler(text: str) -> str:
    """`text` without the frames of `write_to` in the thread that aborted."""
    return re.sub(r'^  File ".*", line \d+ in before_abort\n', "", text, flags=re.MULTILINE)
