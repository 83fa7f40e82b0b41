"""A signal asks for a stop; the loop decides where: at the next step boundary, on all ranks at once."""

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

# Slurm signals the whole step and torchrun passes the same signal on: one request may arrive twice.
_SAME_REQUEST_S = 0.5


class StopRequest:
    """A flag set by SIGTERM, SIGINT or SIGUSR1 while the ``with`` block runs; a second signal ends the
    process.

    The flag belongs to this process alone: ranks agree on it by a reduction at each step boundary. Must be
    entered in the main thread, as Python delivers signals there. A handler only runs between two bytecodes,
    so a rank that waits inside a collective answers when the collective returns.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._first_at_s = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def is_set(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.signal is None:
            self.signal, self._first_at_s = signal.Signals(number), now_s
        elif now_s - self._first_at_s > _SAME_REQUEST_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
