"""Evaluation of a model on held-out data: metrics that count each sample once."""

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
    """What is needed to compute a model's outputs, for evaluation."""

    ranks: Ranks
    strategy: Strategy
    task: Task
    model: nn.Module  # wrapped by the strategy
    to_device: ToDevice
    seed: int


@torch.no_grad()
def evaluate(context: ModelContext, loader: Iterable[tuple[Any, list[int]]]) -> Evaluation:
    """Evaluate the model on the held-out data (a collective).

    A rank without samples left still takes part in each forward pass, for FSDP's gathers.

    Raises:
        UserError: the rows are not one for each sample, or differ in shape; or metrics are not numbers.
    """
    context.ranks.heartbeat.enter("evaluate")
    with _model_to_evaluate(context) as model, gathering(IN_EVALUATION):
        return _evaluate(context, loader, model)


@contextmanager
def _model_to_evaluate(context: ModelContext) -> Iterator[nn.Module]:
    """Yield the user's module in a state in which the task can evaluate it (a collective)."""
    model = context.strategy.unwrap(context.model)
    with evaluation_mode(model), context.strategy.evaluating(model):
        yield model


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Each module's own mode comes back afterwards, by `model.train()`, which may do more than set flags."""
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
    gives_sums, gives_rows = offers(task, "eval_sums", "summarise"), offers(task, "rows", "summarise_rows")
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
        if gives_sums:
            with context.strategy.autocast():
                given = own_task.eval_sums(model, batch)
            own_sums = real_tensor(given, f"{type(task).__name__}.eval_sums", shape).double()
            shape = own_sums.shape
            of_batch = order.sum_of([own_sums if indices else torch.zeros_like(own_sums)])
            sums = of_batch.clone() if sums is None else sums + of_batch
        if gives_rows:
            with context.strategy.autocast():
                own = own_task.rows(model, batch)
            if (of_all := gather(own, indices)) is not None:
                gathered.append(of_all)
    metrics: dict[str, float] = {}
    rows: Rows | None = None
    totals = order.over_ranks(sums) if sums is not None else None
    if totals is not None:
        by = f"{type(task).__name__}.summarise"
        metrics |= _of_rank_0(_floats(task.summarise(totals), by), by, context.ranks)
    if gives_rows:
        if context.ranks.is_main:
            by_sample = torch.tensor([index for indices, _ in gathered for index in indices]).argsort()
            columns = {name: [part[name] for _, part in gathered] for name in gathered[0][1]}
            rows = {name: torch.cat(parts)[by_sample] for name, parts in columns.items()}
        by = f"{type(task).__name__}.summarise_rows"
        metrics |= on_main(lambda: _floats(task.summarise_rows(rows or {}), by), context.ranks)
    return Evaluation(metrics, totals, rows, first)


def independent_copy(task: Task) -> Task:
    """Return a copy of `task` for a batch that its own metrics must not count: a filler or a dry run.

    It shares parameters, as of a teacher. Returns `task` itself if it can't be copied.
    """
    modules = (part for part in leaves(vars(task)) if isinstance(part, nn.Module))
    shared = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    try:
        return copy.deepcopy(task, shared)
    except Exception:  # whatever the user's objects raise
        return task


def _of_rank_0(own: dict[str, float], source: str, ranks: Ranks) -> dict[str, float]:
    """Rank 0's metrics on every rank, so that all decide by the same (a collective); tells which differ."""
    everyones = gather_objects(own)
    by_name = {name: [theirs.get(name) for theirs in everyones] for name in own}
    differ = {name: values for name, values in by_name.items() if len(set(map(str, values))) > 1}
    if differ and ranks.is_main:
        way_out = "sees its rank's samples alone: add it up over ranks, or compute it from eval_sums or rows"
        words = "%s differs between ranks, and rank 0's counts: %s. A metric that a task keeps %s"
        log.warning(words, source, differ, way_out)
    return everyones[0]


@torch.no_grad()
def predict(
    context: ModelContext, loader: Iterable[tuple[Any, list[int]]]
) -> Iterator[tuple[list[int], Rows] | None]:
    """Yield, batch after batch, indices and the task's predictions for those samples (a collective).

    On rank 0 each sample comes once, in the dataset's order, at any world size; other ranks get None.

    Raises:
        UserError: the rows are not one for each sample, or differ in shape.
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
    """Log what the task shows (a collective): at the end, and before as `train.show_every` says."""
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
    """Convert metrics, which other libraries return as scalars of NumPy or torch."""
    if not isinstance(metrics, Mapping):
        raise UserError(f"{source} gives a {type(metrics).__name__}, but must give numbers by name")
    floats: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            floats[name] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise UserError(f"{source} must give a number as {name}: {error}") from error
    return floats
