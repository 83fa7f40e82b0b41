"""Evaluate a model on validation data, counting each sample once, and make predictions."""

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.accelerator import double
from trainer.data.device import ToDevice
from trainer.distributed.agreement import gather_objects, on_main
from trainer.distributed.gather_samples import IN_EVALUATION, Rows, SampleGather, gathering
from trainer.distributed.ranks import Ranks
from trainer.errors import UserError
from trainer.loggers import RunLog
from trainer.strategies.base import Strategy
from trainer.tasks import Evaluation, Task, offers
from trainer.tasks.label_counts import real_tensor
from trainer.tensors.generators import seed_micro_batch
from trainer.tensors.nested import leaves

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelContext:
    """A model with everything needed to evaluate it."""

    ranks: Ranks
    strategy: Strategy
    task: Task
    model: nn.Module  # wrapped by the strategy
    to_device: ToDevice
    seed: int


@torch.no_grad()
def evaluate(context: ModelContext, loader: Iterable[tuple[Any, list[int]]]) -> Evaluation:
    """Evaluate the model on the validation data (a collective).

    A rank without samples still takes part in each forward pass, because FSDP gathers parameters in it.
    """
    context.ranks.heartbeat.enter("evaluate")
    with _model_to_evaluate(context) as model, gathering(IN_EVALUATION):
        return _evaluate(context, loader, model)


@contextmanager
def _model_to_evaluate(context: ModelContext) -> Iterator[nn.Module]:
    """Yield the unwrapped module in evaluation mode, ready for the task (a collective)."""
    model = context.strategy.unwrap(context.model)
    with evaluation_mode(model), context.strategy.evaluating(model):
        yield model


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode; on exit, call `model.train()` and restore the mode of each module."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()  # a user's train() may return nothing
        yield
    finally:
        model.train(modes[0][1])
        for module, training in modes:
            module.training = training


def _evaluate(context: ModelContext, loader: Iterable[tuple[Any, list[int]]], model: nn.Module) -> Evaluation:
    task = context.task
    has_sums, has_rows = offers(task, "eval_sums", "summarise"), offers(task, "rows", "summarise_rows")
    gather = SampleGather(context.ranks, f"{type(task).__name__}.rows")
    order = context.strategy.order
    sums: Tensor | None = None
    shape: tuple[int, ...] | None = None
    gathered: list[tuple[list[int], Rows]] = []
    first: Any = None
    for host_batch, indices in loader:
        context.ranks.heartbeat.enter("evaluate")
        seed_micro_batch(context.seed, -1, indices[0] if indices else -1, context.strategy.devices)
        batch = context.to_device(host_batch)
        first = batch if first is None else first
        own_task = task if indices else independent_copy(task)
        if has_sums:
            with context.strategy.autocast():
                returned = own_task.eval_sums(model, batch)
            own_sums = double(real_tensor(returned, f"{type(task).__name__}.eval_sums", shape))
            shape = own_sums.shape
            batch_sums = order.sum_of([own_sums if indices else torch.zeros_like(own_sums)])
            sums = batch_sums.clone() if sums is None else sums + batch_sums
        if has_rows:
            with context.strategy.autocast():
                own_rows = own_task.rows(model, batch)
            if (all_rows := gather(own_rows, indices)) is not None:
                gathered.append(all_rows)
    metrics: dict[str, float] = {}
    rows: Rows | None = None
    totals = order.over_ranks(sums) if sums is not None else None
    if totals is not None:
        source = f"{type(task).__name__}.summarise"
        metrics |= _from_rank_0(_floats(task.summarise(totals), source), source, context.ranks)
    if has_rows:
        if context.ranks.is_main:
            by_index = torch.tensor([index for indices, _ in gathered for index in indices]).argsort()
            columns = {name: [part[name] for _, part in gathered] for name in gathered[0][1]}
            rows = {name: torch.cat(parts)[by_index] for name, parts in columns.items()}
        source = f"{type(task).__name__}.summarise_rows"
        metrics |= on_main(lambda: _floats(task.summarise_rows(rows or {}), source), context.ranks)
    return Evaluation(metrics, totals, rows, first)


def independent_copy(task: Task) -> Task:
    """Return a copy of `task` whose metrics are discarded, for the dry run and for ranks without samples.

    The copy shares parameters, such as those of a teacher. Returns `task` itself if it cannot be copied.
    """
    modules = (part for part in leaves(vars(task)) if isinstance(part, nn.Module))
    shared = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    try:
        return copy.deepcopy(task, shared)
    except Exception:  # a user's object may raise anything
        return task


def _from_rank_0(own: dict[str, float], source: str, ranks: Ranks) -> dict[str, float]:
    """Return rank 0's metrics on every rank, and warn if ranks differ (a collective)."""
    of_ranks = gather_objects(own)
    by_name = {name: [metrics.get(name) for metrics in of_ranks] for name in own}
    different = {name: values for name, values in by_name.items() if len(set(map(str, values))) > 1}
    if different and ranks.is_main:
        log.warning(
            "%s differs between ranks, and rank 0's values are used: %s. A metric object in a task sees only "
            "the samples of its own rank; reduce it over ranks, or use eval_sums or rows instead",
            source,
            different,
        )
    return of_ranks[0]


@torch.no_grad()
def predict(
    context: ModelContext, loader: Iterable[tuple[Any, list[int]]]
) -> Iterator[tuple[list[int], Rows] | None]:
    """Yield the indices and the task's predictions for each batch of all ranks (a collective).

    Rank 0 gets each sample once, in the order of the dataset, at any world size; other ranks get None.
    """
    context.ranks.heartbeat.enter("evaluate")
    gather = SampleGather(context.ranks, f"{type(context.task).__name__}.predict")
    with _model_to_evaluate(context) as model:
        for host_batch, indices in loader:
            context.ranks.heartbeat.enter("evaluate")
            with context.strategy.autocast():
                rows = context.task.predict(model, context.to_device(host_batch))
            yield gather(rows, indices)


@torch.no_grad()
def show(context: ModelContext, evaluation: Evaluation, run_log: RunLog, step: int, at_end: bool) -> None:
    """Log the result of `Task.show` if it is due by `train.show_every` or `at_end` (a collective)."""
    if not offers(context.task, "show") or not on_main(
        lambda: at_end or run_log.shows.is_due(), context.ranks
    ):
        return
    with run_log.shows, context.strategy.autocast(), _model_to_evaluate(context) as model:
        shown = context.task.show(model, evaluation)
        run_log.texts(shown.texts, step)
        run_log.images(shown.images, step)
        run_log.plots(lambda: {name: draw() for name, draw in shown.figures.items()}, step, at_end=True)


def _floats(metrics: dict[str, Any], source: str) -> dict[str, float]:
    """Convert metrics, which may be NumPy scalars or tensors, to floats."""
    if not isinstance(metrics, Mapping):
        raise UserError(f"{source} must return a dict of numbers, but returned a {type(metrics).__name__}")
    floats: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            floats[name] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise UserError(f"{source} must return a number for {name}: {error}") from error
    return floats
