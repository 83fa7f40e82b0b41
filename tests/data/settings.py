"""Loader settings for tests, and a loader built with few words."""

from dataclasses import dataclass
from typing import Any

import torch

from trainer.data.loader import EvalLoader, TrainLoader

CPU = torch.device("cpu")


@dataclass
class Settings:
    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool | None = None
    persistent_workers: bool = True
    on_bad_sample: str = "raise"


def train_loader(
    dataset: Any,
    global_batch_size: int,
    num_replicas: int = 1,
    replica: int = 0,
    *,
    micro: int | None = None,
    seed: int = 0,
    **settings: Any,
) -> TrainLoader:
    local = global_batch_size // num_replicas
    return TrainLoader(
        dataset,
        Settings(**settings),
        local_batch_size=local,
        micro_batch_size=micro or local,
        num_replicas=num_replicas,
        replica=replica,
        seed=seed,
        device=CPU,
    )


def eval_loader(
    dataset: Any, batch_size: int, num_replicas: int = 1, replica: int = 0, **settings: Any
) -> EvalLoader:
    return EvalLoader(
        dataset,
        Settings(**settings),
        batch_size=batch_size,
        num_replicas=num_replicas,
        replica=replica,
        seed=0,
        device=CPU,
    )
