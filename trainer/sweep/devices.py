"""Which GPUs each trial sees: its own GPUs, while there are enough."""

import os
from collections import Counter
from collections.abc import Sequence

from trainer.config import Config, LocalLaunchConfig
from trainer.launch.fresh import num_gpus

# How many jobs of a sweep are queued at a time, to leave room for others; SLURM queues them anyway.
_QUEUED_JOBS = 16


class Slots:
    """Room for trials: at most `concurrent`; "auto" gives each trial on a machine with GPUs its own.

    A given number holds even if trials then share GPUs: the least busy ones.
    """

    def __init__(self, concurrent: str, gpus: Sequence[str]) -> None:
        self._limit = None if concurrent == "auto" else int(concurrent)
        self._busy = Counter(dict.fromkeys(gpus, 0))
        self._num_taken = 0

    def free(self, config: Config) -> list[str] | None:
        """Room for a trial: its GPUs, [] if it uses none; None if there is no room."""
        wanted = _gpus_wanted(config, len(self._busy))
        gpus = sorted(self._busy, key=lambda gpu: self._busy[gpu])[:wanted]  # the least busy ones
        if self._limit is None and gpus:
            has_room = not any(self._busy[gpu] for gpu in gpus)
        else:
            has_room = self._num_taken < (self._limit or (_QUEUED_JOBS if config.launch.in_cluster else 1))
        return gpus if has_room else None

    def take(self, gpus: Sequence[str]) -> None:
        self._busy.update(gpus)
        self._num_taken += 1

    def give_back(self, gpus: Sequence[str]) -> None:
        self._busy.subtract(gpus)
        self._num_taken -= 1


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is not None:
        return [name for name in told.split(",") if name and name != "-1"]
    return [str(index) for index in range(num_gpus())]


def _gpus_wanted(config: Config, num_gpus: int) -> int:
    if config.distributed.device == "cpu" or config.launch.in_cluster:
        return 0
    if config.strategy.name == "dp":
        return num_gpus
    if isinstance(config.launch, LocalLaunchConfig):
        return min(config.launch.processes or num_gpus, num_gpus)
    return min(1, num_gpus)
