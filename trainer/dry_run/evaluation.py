"""The dry run of an evaluation, which finds mistakes that would otherwise appear only after an epoch."""

import logging
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch.distributed

from trainer.config import Config
from trainer.context import Run
from trainer.dry_run.step import state_restored
from trainer.errors import RunEndError, UserError, class_and_line
from trainer.evaluation import ModelContext, evaluate, independent_copy
from trainer.optim.schedules import watched_metric
from trainer.tasks import Task
from trainer.tensors.generators import generators_kept

log = logging.getLogger(__name__)

_MISTAKES = (UserError, NameError, AttributeError, TypeError, KeyError, ImportError)
"""Errors that do not depend on the number of samples."""


def dry_run_of_evaluation(run: Run) -> None:
    """Evaluate the first validation batch without side effects (a collective).

    This uses a copy of the task, and does nothing if the task can't be copied. Errors in `summarise` that a
    lack of data may explain are only warnings, because it may need more than one batch, for example samples
    of each class.

    Raises:
        UserError: the evaluation fails, or does not return a metric that a setting names.
    """
    if run.data.eval_loader is None or (task := independent_copy(run.task)) is run.task:
        return
    start, failures = time.perf_counter(), list[str]()
    with generators_kept(), state_restored(run.state.model):
        first = next(iter(run.data.eval_loader))
        for method in ("summarise", "summarise_rows"):
            if (summarise := getattr(task, method, None)) is not None:
                setattr(task, method, _lenient(summarise, failures))
        context = ModelContext(run.ranks, run.strategy, task, run.model, run.data.to_device, run.seed)
        try:
            metrics = evaluate(context, [first]).metrics
        except Exception as error:
            if isinstance(error, RunEndError | OSError | torch.OutOfMemoryError) or _in_collective(error):
                raise
            raise UserError(
                f"{type(run.task).__name__} fails on the first validation batch, in the dry run of an "
                f"evaluation: {class_and_line(error)}. Fix it, or set train.eval_every_epochs=0 to train "
                "without evaluation"
            ) from error
    for failure in failures:
        log.warning(
            "%s.%s. The dry run used only the first validation batch; if all batches raise the same error, "
            "the run stops at the first evaluation",
            type(run.task).__name__,
            failure,
        )
    if not failures and not _metric_names(run.task):
        check_metrics(run.config, metrics)
    log.info("dry run of one evaluation batch: ok, %.2f s", time.perf_counter() - start)


def check_metrics_of_task(config: Config, task: Task) -> None:
    """Raise UserError if a setting names a metric that is not in the task's `metric_names`, if it has any."""
    if listed := _metric_names(task):
        check_metrics(config, listed)


def check_metrics(config: Config, names: Collection[str]) -> None:
    """Raise UserError if a setting names a metric that is not among `names`, the metrics of an evaluation."""
    averages = names if config.ema.decay is not None and config.ema.evaluate == "both" else ()
    metrics = [f"eval/{name}" for name in names] + [f"eval/ema/{name}" for name in averages]
    for name, metric in metrics_in_use(config).items():
        if metric not in metrics:
            raise UserError(
                f"{name}.metric={metric} is not a metric of the evaluation; use one of {', '.join(metrics)}"
            )


def metrics_in_use(config: Config) -> dict[str, str]:
    """Return the evaluation metrics that settings name, by the name of the setting."""
    best, stop = config.checkpoint.keep_best, config.train.early_stopping
    named = {
        "checkpoint.keep_best": best.metric if best is not None else None,
        "train.early_stopping": stop.metric if stop is not None else None,
        "schedule": watched_metric(config.schedule),
    }
    return {name: metric for name, metric in named.items() if metric is not None}


def _metric_names(task: Task) -> Collection[str]:
    return list(getattr(task, "metric_names", ()))


def _lenient(summarise: Callable[[Any], dict[str, float]], failures: list[str]) -> Callable[[Any], Any]:
    """Wrap `summarise` so that errors that may be due to a lack of samples go to `failures`."""

    def attempt(gathered: Any) -> Any:
        try:
            return summarise(gathered)
        except _MISTAKES:
            raise
        except Exception as error:
            failures.append(f"{summarise.__name__} raised {class_and_line(error)}")
            return {}

    return attempt


def _in_collective(error: Exception) -> bool:
    collectives, frames = Path(torch.distributed.__file__).parent, traceback.extract_tb(error.__traceback__)
    return any(Path(frame.filename).is_relative_to(collectives) for frame in frames)
