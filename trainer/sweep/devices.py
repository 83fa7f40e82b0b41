"""Which GPUs each trial sees: its own GPUs, while there are enough."""

import os
from collections import Counter
from collections.abc import Sequence

from trainer.config import Config, LocalLaunchConfig
from trainer.launch.fresh import num_gpus

# How many jobs of a sweep are queued at a time, to leave room for others; SLURM queues them anyway.
_QUEUED_JOBS = 16


def room(
    config: Config, concurrent: str, gpus: Sequence[str], taken: Sequence[Sequence[str]]
) -> list[str] | None:
    """The GPUs for a trial, [] if it uses none; None if there is no room.

    Args:
        concurrent: how many trials run at most, even if they then share GPUs: the least busy ones. "auto"
            gives each its own; without GPUs they run one at a time.
        gpus: the GPUs of this machine.
        taken: those of each trial that runs.
    """
    busy = Counter(gpu for some in taken for gpu in some)
    own = sorted(gpus, key=lambda gpu: busy[gpu])[: _num_wanted(config, len(gpus))]
    if concurrent == "auto" and own:
        return None if any(busy[gpu] for gpu in own) else own
    at_most = int(concurrent) if concurrent != "auto" else _QUEUED_JOBS if config.launch.in_cluster else 1
    return own if len(taken) < at_most else None


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is not None:
        return [name for name in told.split(",") if name and name != "-1"]
    return [str(index) for index in range(num_gpus())]


def _num_wanted(config: Config, num_gpus: int) -> int:
    if config.distributed.device == "cpu" or config.launch.in_cluster:
        return 0
    if config.strategy.name == "dp":
        return num_gpus
    if isinstance(config.launch, LocalLaunchConfig):
        return min(config.launch.processes or num_gpus, num_gpus)
    return min(1, num_gpus)
