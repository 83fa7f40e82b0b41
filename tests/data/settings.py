"""Loader settings for tests, and a function that builds a loader."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import default_collate

from trainer.config import DataConfig
from trainer.data.loading import loaders
from trainer.data.loading.batch import split_batch
from trainer.data.loading.loaders import EvalLoader, TrainLoader
from trainer.data.loading.reader import Collate, LoaderOptions
from trainer.data.order import Order, shuffled
from trainer.errors import UserError

CPU = torch.device("cpu")


def reading(**settings: Any) -> DataConfig:
    """Return settings of data.*, by default those of conf/train.yaml."""
    usual = {"num_workers": 0, "prefetch_factor": 2, "pin_memory": None, "persistent_workers": True}
    return DataConfig(**{**usual, "on_bad_sample": "raise", "sharded": False, **settings})


def train_loader(
    dataset: Any,
    global_batch_size: int,
    num_replicas: int = 1,
    replica: int = 0,
    *,
    micro: int | None = None,
    seed: int = 0,
    timeout_s: float = 60,
    collate: Collate = default_collate,
    order: Order = shuffled,
    **settings: Any,
) -> TrainLoader:
    return loaders.train_loader(
        dataset,
        reading(**settings),
        split_batch(global_batch_size, micro, num_replicas),
        LoaderOptions(replica, seed, CPU, timeout_s, collate=collate),
        order,
    )


def message_of(batches: Iterable[Any]) -> str:
    """Return the text of the exception of reading. The exception itself would keep its frames and their workers."""
    try:
        list(batches)
    except UserError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def eval_loader(
    dataset: Any,
    batch_size: int,
    num_replicas: int = 1,
    replica: int = 0,
    *,
    collate: Collate = default_collate,
    **settings: Any,
) -> EvalLoader:
    return loaders.eval_loader(
        dataset,
        reading(**settings),
        split_batch(batch_size * num_replicas, None, num_replicas),
        LoaderOptions(replica, 0, CPU, collate=collate),
    )
