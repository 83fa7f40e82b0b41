"""Build datasets, loaders and the transfer of batches to the device."""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import default_collate

from trainer.config import Config, DataConfig, TrainConfig
from trainer.config.instantiate import filled, instantiate
from trainer.data.device import Normalise, ToDevice
from trainer.data.loading.batch import BatchSplit, split_batch, split_chunks
from trainer.data.loading.loaders import EvalLoader, TrainLoader, eval_loader, train_loader
from trainer.data.loading.reader import Collate, LoaderOptions
from trainer.data.order import shuffled
from trainer.data.transforms import Transformed
from trainer.distributed.ranks import Ranks
from trainer.errors import UserError
from trainer.strategies.base import Strategy


class LoadedData(NamedTuple):
    """The training data, and loaders of this process's part of the training and validation data."""

    train_set: Any
    train_loader: TrainLoader
    eval_loader: EvalLoader | None  # None: the run never evaluates


def split_for(train: TrainConfig, strategy: Strategy) -> BatchSplit:
    """Return how a global batch is divided among the replicas of `strategy`."""
    size, micro, replicas = train.global_batch_size, train.known_micro_batch_size, strategy.num_replicas
    if train.exact is None:
        split = split_batch(size, micro, replicas)
        return split if strategy.replica < replicas else dataclasses.replace(split, accumulation=0)
    return split_chunks(size, micro, train.exact, replicas, train.own_chunks(replicas, strategy.replica))


def load_data(config: Config, batch: BatchSplit, strategy: Strategy, ranks: Ranks) -> LoadedData:
    """Build the datasets and loaders that `config` specifies."""
    train_set = build_dataset(config.data, "train")
    options = _loader_options(config, ranks, strategy.replica)
    order = _callable("data.order", config.data.order, shuffled)
    to_train = train_loader(train_set, config.data, batch, options, order)
    if not config.train.evaluates:
        return LoadedData(train_set, to_train, None)
    return LoadedData(train_set, to_train, load_held_out(config, batch, ranks)[1])


def load_held_out(config: Config, batch: BatchSplit, ranks: Ranks) -> tuple[Any, EvalLoader]:
    """Return the validation data, and the loader of this process's part of it."""
    eval_set = build_dataset(config.data, "eval")
    # All ranks evaluate, including a rank that has no training samples.
    every_rank = dataclasses.replace(batch, num_replicas=ranks.world_size)
    return eval_set, eval_loader(
        eval_set, config.data, every_rank, _loader_options(config, ranks, ranks.rank)
    )


def first_batch(config: Config, train_set: Any, size: int) -> Any:
    """Return the first `size` samples of an epoch as a batch, read in this process."""
    return next(local_batches(config, train_set, size))


def local_batches(config: Config, train_set: Any, size: int) -> Iterator[Any]:
    """Yield batches of `size` samples without end, read in this process and equal on every rank."""
    assert config.seed is not None
    data = dataclasses.replace(config.data, num_workers=0, pin_memory=False)
    options = LoaderOptions(0, config.seed, torch.device("cpu"), collate=build_collate(data))
    loader = train_loader(train_set, data, BatchSplit(size, 1, size, 1), options)
    for epoch in itertools.count():
        batches = loader.epoch(epoch)
        while batches.data_left:
            yield from batches.take()


def _loader_options(config: Config, ranks: Ranks, replica: int) -> LoaderOptions:
    assert config.seed is not None
    timeout_s, collate = config.distributed.timeout_s, build_collate(config.data)
    return LoaderOptions(replica, config.seed, ranks.device, timeout_s, ranks.heartbeat, collate)


def build_collate(data: DataConfig) -> Collate:
    return _callable("data.collate", data.collate, default_collate)


def _callable(name: str, node: dict[str, Any] | None, default: Callable[..., Any]) -> Callable[..., Any]:
    if node is None:
        return default
    found = instantiate(name, node)
    if not callable(found):
        raise UserError(
            f"{name}: expected a callable, but {node['_target_']} returned a {type(found).__name__}; to pass "
            "a function itself, set _partial_: true"
        )
    return found


def build_dataset(data: DataConfig, split: str) -> Any:
    """Build the dataset for `split`, with the transforms from the settings."""
    dataset = instantiate("data.dataset", data.dataset, split=split)
    setting = f"{split}_transforms"
    if nodes := getattr(data, setting):
        transforms = [instantiate(f"data.{setting}[{number}]", node) for number, node in enumerate(nodes)]
        return Transformed(dataset, transforms, f"data.{setting}")
    return dataset


def as_built(config: Config, train_set: Any) -> Config:
    """Return `config` with values from the training data filled in, so that the model can be used without it.

    An `auto` setting stays `auto` if its value cannot be written as YAML.
    """
    model = _without_auto(config.model, filled("model", config.model, train_set))
    given = _normalisation(config, train_set)
    images = dataclasses.replace(config.data.images, mean=given["mean"], std=given["std"])
    return dataclasses.replace(config, model=model, data=dataclasses.replace(config.data, images=images))


def _without_auto(node: dict[str, Any], built: dict[str, Any]) -> dict[str, Any]:
    found = dict(node)
    for name, value in node.items():
        if isinstance(value, dict):
            found[name] = _without_auto(value, built[name])
        elif value == "auto":
            with contextlib.suppress(TypeError):
                found[name] = json.loads(json.dumps(built[name]))
    return found


def build_to_device(config: Config, device: torch.device, train_set: Any = None) -> ToDevice:
    """Build the transfer of batches to `device`, with mean and std from the settings or the dataset."""
    given = _normalisation(config, train_set)
    normalise = Normalise(given["mean"], given["std"], device) if given["mean"] and given["std"] else None
    return ToDevice(device, config.train.channels_last, normalise)


def _normalisation(config: Config, train_set: Any) -> dict[str, list[float]]:
    images = config.data.images
    given = {
        "mean": getattr(train_set, "mean", None) if images.mean is None else images.mean,
        "std": getattr(train_set, "std", None) if images.std is None else images.std,
    }
    return {
        name: [] if values is None else torch.as_tensor(values, dtype=torch.float64).flatten().tolist()
        for name, values in given.items()
    }
