"""Evaluate one batch before the first step, to find mistakes that would otherwise show after an epoch."""

import logging
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch.distributed

from trainer.config import Config
from trainer.context import Run
from trainer.dry_run.step import traceless
from trainer.errors import RunEndError, UserError, class_and_line
from trainer.evaluation import ModelContext, evaluate, independent_copy
from trainer.optim.schedules import watched_metric
from trainer.tasks import Task
from trainer.tensors.generators import generators_kept

log = logging.getLogger(__name__)

_MISTAKES = (UserError, NameError, AttributeError, TypeError, KeyError, ImportError)
"""Errors that more samples can't prevent."""


def dry_run_of_evaluation(run: Run) -> None:
    """Evaluate the first held-out batch, and leave no trace (a collective).

    This uses a copy of the task, and does nothing if the task can't be copied. `summarise` may need more than
    one batch, for example samples of each class, so an error there that the data can cause is a warning.

    Raises:
        UserError: the evaluation fails, or lacks a metric that a setting names.
    """
    if run.data.eval_loader is None or (task := independent_copy(run.task)) is run.task:
        return
    begin, failed = time.perf_counter(), list[str]()
    with generators_kept(), traceless(run.state.model):
        first = next(iter(run.data.eval_loader))
        for method in ("summarise", "summarise_rows"):
            if (summarise := getattr(task, method, None)) is not None:
                setattr(task, method, _lenient(summarise, failed))
        context = ModelContext(run.ranks, run.strategy, task, run.model, run.data.to_device, run.seed)
        try:
            metrics = evaluate(context, [first]).metrics
        except Exception as error:
            if isinstance(error, RunEndError | OSError | torch.OutOfMemoryError) or _is_of_ranks(error):
                raise
            raise UserError(
                f"{type(run.task).__name__} fails in the dry run of an evaluation, with the first held-out "
                f"batch: {class_and_line(error)}. Fix it, or set train.eval_every_epochs=0 to train without "
                "evaluation"
            ) from error
    for words in failed:
        log.warning(
            "%s.%s. The dry run used only the first held-out batch; if this also fails with all batches, "
            "the first evaluation ends the run",
            type(run.task).__name__,
            words,
        )
    if not failed and not _listed(run.task):
        check_metrics(run.config, metrics)
    log.info("dry run of one evaluation batch: ok, %.2f s", time.perf_counter() - begin)


def check_metrics_of_task(config: Config, task: Task) -> None:
    """Raise UserError for a metric in the settings that is not in the `metric_names` of the task, if any."""
    if listed := _listed(task):
        check_metrics(config, listed)


def check_metrics(config: Config, names: Collection[str]) -> None:
    """Raise UserError for a metric in the settings that is not among `names`, which evaluation yields."""
    averages = names if config.ema.decay is not None and config.ema.evaluate == "both" else ()
    metrics = [f"eval/{name}" for name in names] + [f"eval/ema/{name}" for name in averages]
    for name, metric in metrics_in_use(config).items():
        if metric not in metrics:
            raise UserError(
                f"{name}.metric is {metric}, but must be one that evaluation yields: {', '.join(metrics)}"
            )


def metrics_in_use(config: Config) -> dict[str, str]:
    """Return the metrics of evaluation by which the run decides, each by the setting that names it."""
    best, stop = config.checkpoint.keep_best, config.train.early_stopping
    named = {
        "checkpoint.keep_best": best.metric if best is not None else None,
        "train.early_stopping": stop.metric if stop is not None else None,
        "schedule": watched_metric(config.schedule),
    }
    return {name: metric for name, metric in named.items() if metric is not None}


def _listed(task: Task) -> Collection[str]:
    return list(getattr(task, "metric_names", ()))


def _lenient(summarise: Callable[[Any], dict[str, float]], failed: list[str]) -> Callable[[Any], Any]:
    """Wrap `summarise` to add errors that too few samples can cause to `failed`, and not raise them."""

    def attempt(gathered: Any) -> Any:
        try:
            return summarise(gathered)
        except _MISTAKES:
            raise
        except Exception as error:
            failed.append(f"{summarise.__name__} raised {class_and_line(error)}")
            return {}

    return attempt


def _is_of_ranks(error: Exception) -> bool:
    """Return whether a collective raised the error, since another rank may have failed."""
    collectives, frames = Path(torch.distributed.__file__).parent, traceback.extract_tb(error.__traceback__)
    return any(Path(frame.filename).is_relative_to(collectives) for frame in frames)
