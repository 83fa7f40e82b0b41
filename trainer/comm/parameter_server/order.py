"""The order of a server's events: recorded as they come, or repeated as recorded."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from trainer.comm.transport.blame import PeerError


class OutOfOrderError(RuntimeError):
    """The next event of a replay does not happen."""


class Order:
    """Lets one event happen at a time.

    Attributes:
        events: of this round so far, as "part 2", "pull 2", "push 2": the kind and the rank.
        busy_s: how long events took, over the run.
    """

    def __init__(self, timeout_s: float) -> None:
        self.events: list[str] = []
        self.busy_s = 0.0
        self._to_come: deque[str] | None = None
        self._timeout_s = timeout_s
        self._changed = threading.Condition()

    def start(self, replayed: Sequence[str] | None) -> None:
        """Begin a round; with `replayed`, events must come in exactly that order."""
        self.events, self._to_come = [], None if replayed is None else deque(replayed)

    @contextmanager
    def turn(self, what: str, worker: int) -> Iterator[None]:
        """Wait until this event may happen; exclude all others until it is over.

        Raises:
            OutOfOrderError: it could not happen within the timeout.
        """
        event = f"{what} {worker}"
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_next(event), self._timeout_s):
                first = f"; '{self._to_come[0]}' must come first" if self._to_come else ""
                raise OutOfOrderError(f"{event} has waited {self._timeout_s:g} s for its turn{first}")
            began = time.perf_counter()
            yield
            self.busy_s += time.perf_counter() - began
            self.events.append(event)
            if self._to_come is not None:
                self._to_come.popleft()
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool], slowest: Callable[[], int]) -> None:
        """Wait for a `condition` that events change. Raises PeerError on timeout: the `slowest` rank."""
        with self._changed:
            if not self._changed.wait_for(condition, self._timeout_s):
                raise PeerError.silent_for(slowest(), self._timeout_s, "to push")

    def _is_next(self, event: str) -> bool:
        return self._to_come is None or (bool(self._to_come) and self._to_come[0] == event)
