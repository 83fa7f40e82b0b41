"""When a GPU passed a point of its work, in seconds of this process's `time.perf_counter`."""

import time
from collections.abc import Callable

import torch


class GpuClock:
    """Marks points on streams with events, and reads them later, when the GPU has passed them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.synchronize()

    def synchronize(self) -> None:
        """Compare with the host's clock. Waits for the GPU; repeat it at times, since the two drift apart."""
        torch.cuda.synchronize(self.device)
        self._origin, self._origin_s = self.mark(), time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """Mark the end of the work now on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def times(self, *marks: torch.cuda.Event) -> Callable[[bool], tuple[float, ...] | None]:
        """A function that returns the marks' times, or None if one has not passed and it may not wait."""
        origin, origin_s = self._origin, self._origin_s

        def read(wait: bool) -> tuple[float, ...] | None:
            if wait:
                for mark in marks:
                    mark.synchronize()
            if not all(mark.query() for mark in marks):
                return None
            return tuple(origin_s + origin.elapsed_time(mark) / 1e3 for mark in marks)

        return read
