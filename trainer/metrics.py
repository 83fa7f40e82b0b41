"""Where the time of the steps went, and what the loss was over them."""

import resource
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.distributed import Dist, sum_over_ranks


@dataclass(frozen=True)
class Mark:
    """The totals of a meter at one moment."""

    steps: int
    loss: Tensor
    total_s: float
    data_s: float
    rest_s: float


class Meter:
    """Running totals over steps; what lies between two moments is the difference of two marks.

    Only `mean_loss` waits for the device. The clock stands still while paused, so that evaluation and
    checkpoints do not count. Seconds are the host's: on CUDA they equal the device's over any stretch
    whose loss was read at its end.
    """

    def __init__(self, dist: Dist) -> None:
        self._dist = dist
        self.steps = 0
        self.data_s = 0.0  # waiting for batches
        self.rest_s = 0.0  # logging
        self._loss = torch.zeros((), device=dist.device, dtype=torch.float64)
        self._total_s = 0.0
        self._running_since: float | None = None

    def start(self) -> None:
        self._running_since = time.perf_counter()

    def pause(self) -> None:
        if self._dist.device.type == "cuda":
            torch.cuda.synchronize(self._dist.device)
        self._total_s = self._now_s()
        self._running_since = None

    def count_step(self, loss: Tensor) -> None:
        """Add one step of `loss`, a detached scalar on the device: this rank's mean."""
        self._loss += loss
        self.steps += 1

    def mark(self) -> Mark:
        return Mark(self.steps, self._loss.clone(), self._now_s(), self.data_s, self.rest_s)

    def mean_loss(self, since: Mark) -> float:
        """Mean loss per step over all ranks (a collective); NaN when no step was made."""
        total = sum_over_ranks(self._loss - since.loss).item()
        steps = self.steps - since.steps
        return total / (steps * self._dist.world_size) if steps else float("nan")

    def ms_per_step(self, since: Mark) -> dict[str, float]:
        """Milliseconds per step, and the parts they are made of; NaN when no step was made."""
        steps = self.steps - since.steps
        scale = 1e3 / steps if steps else float("nan")
        step = (self._now_s() - since.total_s) * scale
        data, rest = (self.data_s - since.data_s) * scale, (self.rest_s - since.rest_s) * scale
        return {"step": step, "data": data, "compute": step - data - rest, "rest": rest}

    def _now_s(self) -> float:
        running = time.perf_counter() - self._running_since if self._running_since is not None else 0.0
        return self._total_s + running


def peak_memory_bytes(devices: list[torch.device]) -> dict[str, int]:
    """Peak memory of each device: what the allocator held on a GPU, the process's resident set on a CPU."""
    if devices[0].type == "cuda":
        return {str(device): torch.cuda.max_memory_allocated(device) for device in devices}
    return {"cpu": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
