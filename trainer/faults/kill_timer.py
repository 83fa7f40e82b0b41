"""Has the kernel end this process when its watch has not run for too long: stopped, or never scheduled."""

import ctypes
import signal

_CLOCK_MONOTONIC, _SIGEV_SIGNAL = 1, 0  # from <time.h> and <signal.h>


class _Event(ctypes.Structure):
    _fields_ = (("value", ctypes.c_void_p), ("signo", ctypes.c_int), ("notify", ctypes.c_int),
                ("rest", ctypes.c_char * 48))  # fmt: skip


class _Times(ctypes.Structure):
    _fields_ = (("interval_s", ctypes.c_long), ("interval_ns", ctypes.c_long), ("s", ctypes.c_long),
                ("ns", ctypes.c_long))  # fmt: skip


class KillTimer:
    """A kernel timer that sends SIGKILL after `after_s`, unless it is postponed.

    It works on a process that is stopped, or whose threads all wait for one that holds the interpreter, and
    needs no other process. Without such a timer in the C library, this does nothing.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._timer = ctypes.c_void_p()
        self._libc = ctypes.CDLL(None)
        event = _Event(None, signal.SIGKILL, _SIGEV_SIGNAL)
        create = getattr(self._libc, "timer_create", None)
        self._works = create is not None and not create(
            _CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)
        )

    def put_off(self) -> None:
        self._set(self._after_s)

    def cancel(self) -> None:
        self._set(0)

    def _set(self, seconds: float) -> None:
        if self._works:
            times = _Times(0, 0, int(seconds), int(seconds % 1 * 1e9))
            self._libc.timer_settime(self._timer, 0, ctypes.byref(times), None)
