"""Restore a trained model from its run's settings and a checkpoint."""

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from tqdm import tqdm

from trainer.build.data import build_dataset, build_to_device, load_held_out, split_for
from trainer.build.model import initial_model
from trainer.build.task import build_task
from trainer.checkpoint.finding import read_averages, read_model
from trainer.checkpoint.open_checkpoint import OpenCheckpoint
from trainer.checkpoint.restoring import frozen_digests
from trainer.config import Config, TrainConfig, flatten
from trainer.config.overrides import leaves
from trainer.data.loading.batch import BatchSplit
from trainer.data.loading.loaders import EvalLoader
from trainer.distributed.agreement import Agreement, compare_across_ranks
from trainer.distributed.process_group import process_group
from trainer.distributed.ranks import Ranks
from trainer.errors import UserError
from trainer.evaluation import ModelContext
from trainer.files.address import location
from trainer.run_dir.claim import run_id_of
from trainer.run_dir.console import terminal
from trainer.strategies.base import Strategy
from trainer.strategies.build import build_strategy
from trainer.strategies.meta_init import InitialModel
from trainer.tensors.generators import generators_kept, seed_everything

log = logging.getLogger("trainer")


@dataclass(frozen=True)
class RestoredRun(ModelContext):
    """A `ModelContext` built from a run's settings and the weights of a checkpoint."""

    config: Config
    checkpoint: OpenCheckpoint
    agreement: Agreement
    train_set: Callable[[], Any]  # built at the first call

    @property
    def module(self) -> nn.Module:
        """The user's module, in evaluation mode."""
        model = self.strategy.unwrap(self.model)
        model.eval()
        return model

    def take_averages(self) -> None:
        """Replace the weights with their moving averages (a collective)."""
        read_averages(self.strategy.unwrap(self.model), self.checkpoint, self.agreement)
        self.strategy.weights_changed(self.model)


@contextmanager
def restored_run(config: Config, checkpoint: str) -> Iterator[RestoredRun]:
    """Join the other ranks, if any, and build the model of `config` with the weights of `checkpoint`.

    With `ema.evaluate=ema`, use the moving averages in place of the weights. Nothing in the run directory is
    locked, created or changed, so the run may still be training.
    """
    with process_group(config.distributed) as ranks, terminal(ranks, sys.stderr):
        shared = {name: value for name, value in flatten(config).items() if name != "distributed.rank"}
        compare_across_ranks({**shared, "the checkpoint": checkpoint}, ranks)
        strategy = build_strategy(config, ranks)
        agreement = Agreement(ranks)
        sharded_over = ranks if strategy.fills_by_unit else None
        model, frozen, train_set = _initial(config, agreement, ranks.local_rank, sharded_over)
        assert config.seed is not None
        wrapped = strategy.wrap(model.module, model.fill)
        source = _read(strategy.unwrap(wrapped), config, checkpoint, agreement, frozen)
        strategy.weights_changed(wrapped)
        where = f"{config.strategy.name} on {ranks.world_size} x {ranks.device.type}"
        log.info("%s, %s", source.directory, where)
        seed_everything(config.seed, strategy.replica)
        yield RestoredRun(
            ranks=ranks,
            strategy=strategy,
            task=build_task(config),
            model=wrapped,
            to_device=build_to_device(config, strategy.device, _facts(config, train_set)),
            seed=config.seed,
            config=config,
            checkpoint=source,
            agreement=agreement,
            train_set=train_set,
        )
        strategy.close()


def restored_model(config: Config, checkpoint: str) -> nn.Module:
    """Return the model with the weights of `checkpoint`, on the CPU; random generators stay unchanged."""
    with generators_kept():
        model, frozen, _ = _initial(config, Agreement(), local_rank=0, sharded_over=None)
        model.fill(model.module)
    _read(model.module, config, checkpoint, Agreement(), frozen)
    model.module.eval()
    return model.module


def _initial(
    config: Config, agreement: Agreement, local_rank: int, sharded_over: Ranks | None
) -> tuple[InitialModel, dict[str, str], Callable[[], Any]]:
    """Return the initial model, its `frozen_digests`, and a function that builds the training data.

    Initial weights are read only if checkpoints lack frozen parameters.
    """
    train_set = functools.cache(lambda: build_dataset(config.data, "train"))
    read_by = None if config.checkpoint.frozen else (agreement, local_rank)
    model = initial_model(config, _facts(config, train_set), sharded_over, read_by)
    return model, agreement.on_main(lambda: frozen_digests(model.module, model.loaded)), train_set


def _facts(config: Config, train_set: Callable[[], Any]) -> Any:
    """Return the training data if the settings lack values that depend on it, otherwise None."""
    is_known = config.data.images.mean is not None and "auto" not in dict(leaves(config.model)).values()
    return None if is_known else train_set()


def _read(
    model: nn.Module,
    config: Config,
    checkpoint: str,
    agreement: Agreement,
    frozen: dict[str, str],
) -> OpenCheckpoint:
    run_dir = location(config.run_dir or "")
    run_id = agreement.on_main(lambda: run_id_of(run_dir))
    source = read_model(model, run_dir, run_id, checkpoint, config.checkpoint, agreement, frozen)
    if agreement.rank == 0 and source.manifest.run_id not in (run_id, None):
        log.warning("%s was saved by a different run than the one in %s", source.directory, run_dir)
    if evaluates_ema(config):
        read_averages(model, source, agreement)
    return source


def evaluates_ema(config: Config) -> bool:
    """Return whether the run evaluates its moving averages in place of the weights."""
    return config.ema.decay is not None and config.ema.evaluate == "ema"


def held_out(restored: RestoredRun, by_chunks: bool = True) -> tuple[Any, EvalLoader]:
    """Return the validation data and this rank's loader of it, divided by chunks with train.exact."""
    config, ranks, strategy = restored.config, restored.ranks, restored.strategy
    train = config.train if by_chunks else dataclasses.replace(config.train, exact=None)
    dataset, loader = load_held_out(config, _batch(train, strategy), ranks)
    compare_across_ranks({"the length of the validation data": loader.num_samples}, ranks)
    return dataset, loader


def _batch(train: TrainConfig, strategy: Strategy) -> BatchSplit:
    """Return the batch split of training, for bit-identical sums, or a similar split if it doesn't fit."""
    size, micro = train.global_batch_size, train.known_micro_batch_size
    try:
        return split_for(train, strategy)
    except UserError:
        micro = micro or max(1, size // strategy.num_replicas)
        return BatchSplit(micro * strategy.num_replicas, strategy.num_replicas, micro, 1)


def with_progress(restored: RestoredRun, loader: EvalLoader) -> Iterable[tuple[Any, list[int]]]:
    """Return `loader` with a progress bar on rank 0's standard error, updated every 10 s if it is a file."""
    global_batch_size = loader.batch_size * restored.strategy.num_replicas
    interval_s = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(
        loader,
        total=None if loader.num_samples is None else -(-loader.num_samples // global_batch_size),
        unit="batch",
        dynamic_ncols=True,
        leave=False,
        mininterval=interval_s,
        delay=interval_s,
        disable=not restored.ranks.is_main,
    )
