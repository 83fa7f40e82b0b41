"""The training loop: `fit` trains epochs and evaluates and saves between them, without callbacks."""

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.data.loading.base import EvalLoader
from trainer.errors import StoppedBySignal, UserError
from trainer.inference.evaluation import evaluate, show
from trainer.optim.schedules import after_evaluation
from trainer.step import AfterStep, train_step
from trainer.training.context import TrainingContext
from trainer.training.log_step import log_step
from trainer.training.meter import peak_memory_bytes

log = logging.getLogger(__name__)

# fp16 may skip the first update for an overflow; the schedule still counts the step.
warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")


def fit(context: TrainingContext) -> dict[str, float]:
    """Train to the last step and return the run's metrics by their names in result.json.

    Raises:
        NonFiniteError: on all ranks at the same step, before its update.
        StoppedBySignal: on all ranks at the same step, after saving it.
    """
    progress, settings, meter = context.state.progress, context.settings, context.meter
    steps_per_epoch = context.train_loader.steps_per_epoch
    if steps_per_epoch is None or context.total_steps - progress.step <= steps_per_epoch:
        unsteady_steps = 10
    else:
        unsteady_steps = steps_per_epoch
    steady = epoch_begin = meter.mark()
    context.model.train()
    evaluation = context.checkpointer.restored_metrics
    if context.steps_before and not evaluation:
        evaluation = evaluate_if_due(context)  # a signal saved the checkpoint before its evaluation was made

    while not is_over(context):
        epoch_begin = meter.mark()
        for _ in train_epoch(context):
            if steady.steps == 0 and progress.step >= context.steps_before + unsteady_steps:
                steady = meter.mark()
        evaluation = evaluate_if_due(context)
        if is_over(context) or context.checkpointer.due(progress, end_of_epoch=True):
            save(context)

    early_end = context.state.early_end
    if early_end.setting is not None:
        log.info("the run ends after step %d of %d: %s", progress.step, context.total_steps, early_end.why())
    context.profile.close()
    context.dist.heartbeat.enter("end")
    context.strategy.finish_checks()
    train_loss = meter.mean_loss(epoch_begin)
    ms_per_step = meter.ms_per_step(steady)["step"]
    return {
        "steps": progress.step,
        "epochs": progress.epochs(context.train_loader.num_samples),
        "samples_seen": progress.samples_seen,
        "train/loss": train_loss,
        **evaluation,
        "samples_per_second": settings.global_batch_size / ms_per_step * 1e3,
        "ms_per_step": ms_per_step,
        "peak_memory_bytes": max(peak_memory_bytes(context.strategy.devices).values()),
        **({"skipped_steps": progress.skipped_steps} if progress.skipped_steps else {}),
    }


def train_epoch(context: TrainingContext) -> Iterator[None]:
    """Train to the end of the epoch or of the run, whichever comes first; yields after each step."""
    progress, settings = context.state.progress, context.settings
    heartbeat, meter = context.dist.heartbeat, context.meter
    heartbeat.enter("data")
    epoch, batches = progress.epoch, context.train_loader.epoch(progress.epoch, progress.samples_in_epoch)
    if not context.agreement.all_have(batches.data_left):
        skip_epoch(context)
        return
    window = meter.mark()
    meter.start()
    while progress.epoch == epoch and not is_over(context):
        context.profile.before(progress.step + 1, meter)
        result = train_step(context, batches)
        context.count_step(result.losses, result.data_left)
        if result.after is AfterStep.END:
            context.state.early_end.end()
        context.checkpointer.check_once(context.state)
        context.checks.unsaved.look()
        context.checks.replicas.check_if_due(context.state)
        if settings.logs(progress.step):
            log_begin = time.perf_counter()
            heartbeat.enter("log")
            log_step(context, window, result.grad_norm)
            window = meter.mark()
            meter.rest_s += time.perf_counter() - log_begin
        mid_epoch = progress.epoch == epoch and not is_over(context)
        save_now = context.checkpointer.due(progress, end_of_epoch=False)
        stop = result.after is AfterStep.STOP
        if stop or (mid_epoch and (save_now or evaluation_due(context))):
            meter.pause()
            if not stop:
                evaluate_if_due(context)
            if stop or save_now:
                save(context)
            if stop:
                context.checkpointer.finish_saving()
                context.checkpointer.finish_remote()
                raise StoppedBySignal(progress.step)
            meter.start()
        yield
    meter.pause()


def is_over(context: TrainingContext) -> bool:
    progress, early_end = context.state.progress, context.state.early_end
    at_end = progress.step >= context.total_steps or progress.epoch >= context.settings.epochs
    return at_end or early_end.setting is not None


def skip_epoch(context: TrainingContext) -> None:
    """Move to the next epoch if the rest of this one, after smaller batches, is less than a batch.

    Raises:
        UserError: the whole epoch is less than a batch, on some rank; raised on every rank.
    """
    progress = context.state.progress
    if not progress.samples_in_epoch:
        raise UserError(
            f"the training data of epoch {progress.epoch} ends within its first global batch of "
            f"{context.settings.global_batch_size} samples; lower train.global_batch_size, or look at the "
            "stream, with data.sharded at its shortest shard"
        )
    with context.gate.held():
        progress.end_epoch()


def save(context: TrainingContext) -> None:
    """Save a checkpoint, once it is known that all replicas would save the same (a collective)."""
    context.checks.unsaved.look_at_save()
    context.checks.replicas.check(context.state)
    context.strategy.finish_checks()
    evaluation = context.checkpointer.evaluation_of(context.state.progress.step)
    with context.strategy.gathered(context.state):
        context.checkpointer.save(context.state, evaluation, context.train_loader.state_dict())


def evaluation_due(context: TrainingContext) -> bool:
    progress, settings = context.state.progress, context.settings
    if settings.eval_every_steps is not None and progress.step % settings.eval_every_steps == 0:
        return True
    every = settings.eval_every_epochs
    end_of_epoch = progress.samples_in_epoch == 0 and every > 0 and progress.epoch % every == 0
    return end_of_epoch or is_over(context)


def evaluate_if_due(context: TrainingContext) -> dict[str, float]:
    """Evaluate at the end of the run, and after an epoch or a step if due; otherwise return no metrics.

    Returns:
        The metrics by their names in result.json; they are logged, and passed to the schedule.
    """
    progress = context.state.progress
    if context.eval_loader is None or not evaluation_due(context):
        return {}
    if known := context.checkpointer.evaluation_of(progress.step):  # made in mid-epoch, and it ended the run
        return known
    metrics: dict[str, float] = {}
    has_average, instead = context.state.average is not None, context.ema.evaluate == "instead"
    context.strategy.finish_checks()  # before the evaluation overwrites what it would find
    if not (has_average and instead):
        metrics |= evaluate_as(context, context.eval_loader, "eval/")
    if has_average:
        with averages_in_place(context):
            metrics |= evaluate_as(context, context.eval_loader, "eval/" if instead else "eval/ema/")
    context.run_log.scalars(metrics, progress.step)
    context.run_log.line(f"eval at step {progress.step}  {_words(metrics)}")
    with context.gate.held():
        after_evaluation(context.state.schedule, metrics)
        context.state.early_end.after_evaluation(progress.step, metrics)
        context.checkpointer.last_evaluation = progress.step, metrics
    return metrics


def evaluate_as(context: TrainingContext, loader: EvalLoader, prefix: str) -> dict[str, float]:
    """Evaluate the weights that the model has now; the metrics' names begin with `prefix`."""
    evaluation = evaluate(context, loader)
    context.strategy.finish_checks()
    if prefix == "eval/":
        step = context.state.progress.step
        show(context, evaluation, context.run_log, step, at_end=is_over(context))
    return {f"{prefix}{name}": value for name, value in evaluation.metrics.items()}


@contextmanager
def averages_in_place(context: TrainingContext) -> Iterator[None]:
    """Within, the model has its moving averages in place of its weights."""
    assert context.state.average is not None
    with context.gate.held(), context.state.average.in_place():
        context.strategy.weights_changed(context.model)
        yield
    context.strategy.weights_changed(context.model)


def _words(values: dict[str, float]) -> str:
    return "  ".join(f"{name.removeprefix('eval/')} {value:.4f}" for name, value in values.items())
