"""The training loop: `fit` makes steps, and evaluates and saves between them, without callbacks."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.accelerator import peak_memory_bytes
from trainer.context import Run
from trainer.data.loading.loaders import Batches, EvalLoader
from trainer.dry_run.evaluation import check_metrics, dry_run_of_evaluation, metrics_in_use
from trainer.dry_run.step import dry_run
from trainer.errors import StoppedBySignal, UserError, first_few
from trainer.evaluation import evaluate, show
from trainer.log_step import log_first_step, log_step
from trainer.state.progress import Update
from trainer.step import train_step
from trainer.step_vote import AfterStep
from trainer.task_hooks import refuse_changed_by_loss

log = logging.getLogger(__name__)

# fp16 may skip the first update for an overflow; the schedule still counts the step.
warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")


def fit(run: Run) -> dict[str, float]:
    """Train to the last step and return the run's metrics by their names in result.json.

    Raises:
        NonFiniteError: on all ranks at the same step, before its update.
        StoppedBySignal: on all ranks at the same step, after saving it.
    """
    progress, settings, meter = run.state.progress, run.config.train, run.report.meter
    steady = epoch_begin = meter.mark()
    began_within_epoch = progress.samples_in_epoch > 0
    run.model.train()
    evaluation = run.checkpointer.restored_metrics
    if not evaluation.keys() >= set(metrics_in_use(run.config).values()):
        evaluation = {}  # an evaluation of a task with other metrics
    # A signal or a failure may have saved the checkpoint before its evaluation was made.
    if run.plan.steps_before and not evaluation and evaluation_due(run):
        evaluation, _ = evaluate_now(run)
    elif evaluation and progress.evaluated_step != progress.step:
        run.state.after_evaluation(evaluation)

    batches, is_dry_run_made, is_told = None, False, not run.data.train_loader.is_divided
    while not is_over(run):
        if batches is None:
            epoch_first_sample = progress.samples_seen - progress.samples_in_epoch
            epoch, batches = progress.epoch, open_epoch(run)
            if batches is not None and not is_dry_run_made:
                changed_weights = dry_run(run, batches)
                dry_run_of_evaluation(run)
                run.checkpointer.check(run.state, changed_weights)
                run.guards.unsaved.start(run.checkpointer.restored_unsaved)
                is_dry_run_made = True
            epoch_begin = meter.begin_window()
        after = make_step(run, batches) if batches is not None else AfterStep.CONTINUE
        if steady.steps == 0 and progress.step >= run.plan.steps_before + unsteady_steps(run):
            steady = meter.mark()
        if progress.epoch != epoch:
            if batches is not None and not is_told:
                is_told = warn_if_uneven(run, batches, epoch, progress.samples_seen - epoch_first_sample)
            batches = None
        if after is AfterStep.STOP:
            meter.pause()
            save(run)
            run.checkpointer.saving.wait()
            run.checkpointer.finish_remote()
            raise StoppedBySignal(progress.step, run.config.run_dir)
        save_due = run.checkpointer.due(progress, end_of_epoch=batches is None) or after is AfterStep.SAVE
        if batches is None or save_due or evaluation_due(run):
            meter.pause()
        if evaluation_due(run):
            evaluation, is_best = evaluate_now(run)
            save_due |= is_best
        if save_due or is_over(run):
            save(run)

    meter.pause()
    early_end = run.state.early_end
    if early_end.setting is not None:
        log.info("the run ends after step %d of %d: %s", progress.step, run.plan.total_steps, early_end.why())
    run.report.profile.close()
    run.ranks.heartbeat.enter("end")
    ms_per_step = meter.ms_per_step(steady)["step"]
    return {
        "steps": progress.step,
        "epochs": progress.epochs(run.data.train_loader.num_samples),
        "samples_seen": progress.samples_seen,
        "train/loss": meter.mean_loss(epoch_begin),
        **({"train/loss_steps": meter.steps} if began_within_epoch and not epoch_begin.steps else {}),
        **evaluation,
        "samples_per_second": settings.global_batch_size / ms_per_step * 1e3,
        "ms_per_step": ms_per_step,
        "peak_memory_bytes": max(peak_memory_bytes(run.strategy.devices).values()),
        **({"skipped_steps": progress.skipped_steps} if progress.skipped_steps else {}),
    }


def make_step(run: Run, batches: Batches) -> AfterStep:
    """Make the next step, count it, look at what it left, and log if that is due (a collective)."""
    progress, meter = run.state.progress, run.report.meter
    meter.start()
    run.report.profile.before(progress.step + 1, meter)
    step = train_step(run, batches)
    meter.count_step(step.losses, step.update)
    run.report.run_log.progress.advance()
    if step.after is AfterStep.END:
        run.state.early_end.end()
    run.guards.unsaved.after_step()
    run.guards.replicas.check_if_due(run.state)
    if run.plan.logs(progress.step):
        run.ranks.heartbeat.enter("log")
        with meter.resting():
            log_step(run, step.grad_norm)
        meter.begin_window()
    elif (
        progress.step == run.plan.steps_before + 1
        and run.plan.log_interval is not None
        and step.update is not Update.SKIPPED
    ):
        run.ranks.heartbeat.enter("log")
        with meter.resting():
            log_first_step(run, step.losses)
    return step.after


def is_over(run: Run) -> bool:
    progress, early_end = run.state.progress, run.state.early_end
    at_end = progress.step >= run.plan.total_steps or progress.epoch >= run.config.train.epochs
    return at_end or early_end.setting is not None


def unsteady_steps(run: Run) -> int:
    """How many steps of this process the measured speed leaves out: an epoch, if more follow, or 10."""
    steps_per_epoch = run.data.train_loader.steps_per_epoch
    if steps_per_epoch is None or run.plan.total_steps - run.plan.steps_before <= steps_per_epoch:
        return 10
    return steps_per_epoch


def open_epoch(run: Run) -> Batches | None:
    """The batches left of this epoch (a collective); None if they are less than a step: it is ended.

    Raises:
        UserError: the whole epoch is less than a batch, on some rank; raised on every rank.
    """
    progress = run.state.progress
    run.ranks.heartbeat.enter("data")
    batches = run.data.train_loader.epoch(progress.epoch, progress.samples_in_epoch)
    ended, _ = run.vote.ended(batches)
    if not ended:
        return batches
    if not progress.samples_in_epoch:
        where = f" on rank {first_few(ended)}" if run.data.train_loader.is_divided else ""
        raise UserError(
            f"the training data of epoch {progress.epoch} ends within its first global batch of "
            f"{run.config.train.global_batch_size} samples{where}; lower train.global_batch_size, or look at "
            "the stream, with data.sharded at its shortest shard"
        )
    with run.guards.snapshot.change():
        progress.end_epoch()
    return None


def warn_if_uneven(run: Run, batches: Batches, epoch: int, num_samples: int) -> bool:
    """Warn if the epoch ended while some ranks had data for another step; return whether (a collective)."""
    ended, having = run.vote.ended(batches)
    if having and run.ranks.is_main:
        log.warning(
            "epoch %d ended after %s samples, because the stream ended on rank %s. At least %s more samples "
            "of rank %s are not used. Give every rank the same number of samples, or have the stream repeat "
            "endlessly, and set train.max_steps",
            *(epoch, f"{num_samples:,}", first_few(ended), run.data.split.local_size, first_few(having)),
        )
    return bool(having)


def save(run: Run) -> None:
    """Save a checkpoint, once it is known that all replicas would save the same (a collective)."""
    refuse_changed_by_loss(run)
    run.checkpointer.unsaved = run.guards.unsaved.compare_at_save()
    run.guards.replicas.check(run.state)
    with run.strategy.gathered(run.state):
        run.checkpointer.save(run.state, run.data.train_loader.state_dict())


def evaluation_due(run: Run) -> bool:
    """Whether to evaluate now: at the end of the run, and after an epoch or a step as the settings say."""
    progress, settings = run.state.progress, run.config.train
    if run.data.eval_loader is None:
        return False
    if settings.eval_every_steps is not None and progress.step % settings.eval_every_steps == 0:
        return True
    every = settings.eval_every_epochs
    end_of_epoch = progress.samples_in_epoch == 0 and every > 0 and progress.epoch % every == 0
    return end_of_epoch or is_over(run)


def evaluate_now(run: Run) -> tuple[dict[str, float], bool]:
    """Evaluate, log and record the metrics, and pass them to the schedule (a collective).

    Returns:
        The metrics by their names in result.json; and whether `checkpoint.keep_best` asks to save this state.
    """
    progress = run.state.progress
    metrics: dict[str, float] = {}
    has_average, instead = run.state.average is not None, run.config.ema.evaluate == "ema"
    assert run.data.eval_loader is not None
    if not (has_average and instead):
        metrics |= evaluate_as(run, run.data.eval_loader, "eval/", shows=not has_average)
    if has_average:
        with averages_in_place(run):
            metrics |= evaluate_as(run, run.data.eval_loader, "eval/" if instead else "eval/ema/", shows=True)
    run.report.run_log.scalars(metrics, progress.step)
    is_best = run.checkpointer.record_evaluation(progress.step, metrics)
    words = "  ".join(f"{name.removeprefix('eval/')} {value:.4f}" for name, value in metrics.items())
    run.report.run_log.progress.line(f"eval at step {progress.step}  {words}{_best_words(run)}")
    with run.guards.snapshot.change():
        run.state.after_evaluation(metrics)
    return metrics, is_best


def _best_words(run: Run) -> str:
    if (best := run.checkpointer.best_so_far(run.state.progress.step)) is None:
        return ""
    metric, value, step = best
    if step == run.state.progress.step:
        return "  (best so far)"
    return f"  (best {metric.removeprefix('eval/')} {value:.4f} at step {step})"


def evaluate_as(run: Run, loader: EvalLoader, prefix: str, shows: bool) -> dict[str, float]:
    """Evaluate the weights that the model has now, and perhaps show what they do.

    The metrics' names begin with `prefix`.
    """
    evaluation = evaluate(run.model_context, loader)
    check_metrics(run.config, evaluation.metrics)
    if shows:
        show(run.model_context, evaluation, run.report.run_log, run.state.progress.step, at_end=is_over(run))
    return {f"{prefix}{name}": value for name, value in evaluation.metrics.items()}


@contextmanager
def averages_in_place(run: Run) -> Iterator[None]:
    """Within, the model has its moving averages in place of its weights."""
    assert run.state.average is not None
    with run.guards.snapshot.change(), run.state.average.in_place():
        run.strategy.weights_changed(run.model)
        yield
    run.strategy.weights_changed(run.model)
