"""Handle requests to stop: after a signal, all ranks stop together at the next step boundary."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
# SLURM signals all processes of a step, and torchrun forwards the same signal: a request may arrive twice.
_SAME_REQUEST_S = 0.5


class StopRequest:
    """A flag that is set by SIGTERM, SIGINT, SIGHUP, SIGUSR1 or the death of the launcher.

    Signals are handled while the ``with`` block runs; a second signal ends the process. The flag is local to
    this process; in each step, `StepVote` combines the flags of all ranks. Enter the block in the main
    thread, to which Python delivers signals. Handlers run between two bytecodes, so a rank that waits in a
    collective reacts when the collective returns.

    Args:
        launched: whether this process must not outlive its parent, such as torchrun's agent.
    """

    def __init__(self, launched: bool = False) -> None:
        self.signal: signal.Signals | None = None
        self._launched, self._parent = launched, os.getppid()
        self._first_at_s = 0.0

    @property
    def is_set(self) -> bool:
        return self.signal is not None

    @property
    def _is_orphaned(self) -> bool:
        return self._launched and os.getppid() != self._parent

    def __enter__(self) -> "StopRequest":
        self._handlers = stop_signals_to(self._on_signal)
        self._handlers.__enter__()
        if self._launched:
            signal_at_parents_death(signal.SIGTERM)
            if self._is_orphaned:  # the parent died before the call above
                self._on_signal(signal.SIGTERM)
        return self

    def __exit__(self, *_: object) -> None:
        if self._launched:
            signal_at_parents_death()  # nothing is left to save
            if self._is_orphaned:  # exit soon: nobody waits for the interpreter's teardown
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(1)
        self._handlers.__exit__(None, None, None)

    def _on_signal(self, number: int) -> None:
        now_s = time.monotonic()
        if self.signal is None:
            self.signal, self._first_at_s = signal.Signals(number), now_s
        # A launcher that forwards a signal and then dies is a single request.
        elif now_s - self._first_at_s > _SAME_REQUEST_S and not self._is_orphaned:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def signal_at_parents_death(number: int = signal.SIGKILL) -> None:
    """On Linux, make the kernel send signal `number` to this process when the parent thread ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


@contextmanager
def stop_signals_to(
    act: Callable[[int], None], numbers: Sequence[signal.Signals] = STOP_SIGNALS
) -> Iterator[None]:
    """Call `act` with the number of each stop signal that arrives while the ``with`` block runs.

    Signals that were ignored before remain ignored. Outside the main thread, to which Python delivers
    signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # nohup ignores SIGHUP, and a shell ignores SIGINT for background jobs.
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, lambda got, _: act(got)) for number in heard}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
