"""The training loop: `fit` runs the steps, and evaluates and saves between them, without callbacks."""

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
from trainer.step import train_step
from trainer.step_vote import AfterStep
from trainer.task_hooks import refuse_changed_by_loss

log = logging.getLogger(__name__)

# With fp16, the first update may be skipped because of an overflow; the schedule still counts that step.
warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")


def fit(run: Run) -> dict[str, float]:
    """Train to the last step, and return the run's metrics by their names in result.json.

    Raises:
        NonFiniteError: a loss or gradient is NaN or Inf; raised on all ranks, before the update of that step.
        WrongResultError: a device computed a wrong result (`train.verify_every`); raised in the same way.
        StoppedBySignal: a signal was received; raised on all ranks, after saving the same step.
    """
    progress, settings, meter = run.state.progress, run.config.train, run.report.meter
    steady = meter.mark()
    started_mid_epoch = progress.samples_in_epoch > 0
    run.model.train()
    evaluation = run.checkpointer.restored_metrics
    if not evaluation.keys() >= set(metrics_in_use(run.config).values()):
        evaluation = {}  # the checkpoint's task had other metrics
    # A checkpoint saved because of a signal or a failure may lack the evaluation that was due.
    if run.plan.steps_before and not evaluation and evaluation_due(run):
        evaluation, _ = evaluate_now(run)
    elif evaluation and progress.evaluated_step != progress.step:
        run.state.after_evaluation(evaluation)

    epochs = Epochs(run)
    while not is_over(run):
        after = epochs.step()
        if steady.steps == 0 and progress.step >= run.plan.steps_before + unsteady_steps(run):
            steady = meter.mark()
        if after is AfterStep.STOP:
            meter.pause()
            save(run)
            run.checkpointer.saving.wait()
            run.checkpointer.finish_remote()
            raise StoppedBySignal(progress.step, run.config.run_dir)
        end_of_epoch = epochs.batches is None
        save_due = run.checkpointer.due(progress, end_of_epoch) or after is AfterStep.SAVE
        if end_of_epoch or save_due or evaluation_due(run):
            meter.pause()
        if evaluation_due(run):
            evaluation, is_best = evaluate_now(run)
            save_due |= is_best
        if save_due or is_over(run):
            save(run)

    meter.pause()
    early_end = run.state.early_end
    if early_end.setting is not None:
        log.info("stopped after step %d of %d: %s", progress.step, run.plan.total_steps, early_end.why())
    run.report.profile.close()
    run.ranks.heartbeat.enter("end")
    ms_per_step = meter.ms_per_step(steady)["step"]
    return {
        "steps": progress.step,
        "epochs": progress.epochs(run.data.train_loader.num_samples),
        "samples_seen": progress.samples_seen,
        "train/loss": meter.mean_loss(meter.epoch_start),
        **({"train/loss_steps": meter.steps} if started_mid_epoch and not meter.epoch_start.steps else {}),
        **evaluation,
        "samples_per_second": settings.global_batch_size / ms_per_step * 1e3,
        "ms_per_step": ms_per_step,
        "peak_memory_bytes": max(peak_memory_bytes(run.strategy.devices).values()),
        **({"skipped_steps": progress.skipped_steps} if progress.skipped_steps else {}),
    }


class Epochs:
    """Runs the steps of `run`; `batches` is the rest of the current epoch, or None between epochs."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.batches: Batches | None = None
        self._is_dry_run_done = False
        self._warned_uneven = not run.data.train_loader.is_divided

    def open(self) -> Batches | None:
        """Return the rest of the epoch; if no data is left, end the epoch and return None (a collective).

        The first call also does the dry run.
        """
        run, progress = self.run, self.run.state.progress
        if self.batches is None:
            self._first_sample = progress.samples_seen - progress.samples_in_epoch
            self._epoch, self.batches = progress.epoch, open_epoch(run)
            if self.batches is not None and not self._is_dry_run_done:
                changed_weights = dry_run(run, self.batches)
                dry_run_of_evaluation(run)
                run.checkpointer.check(run.state, changed_weights)
                run.guards.unsaved.start(run.checkpointer.restored_unsaved)
                self._is_dry_run_done = True
            run.report.meter.begin_epoch()
        return self.batches

    def step(self) -> AfterStep:
        """Run the next step, unless the epoch has no data left for it (a collective)."""
        run, progress, batches = self.run, self.run.state.progress, self.open()
        after = make_step(run, batches) if batches is not None else AfterStep.CONTINUE
        if progress.epoch != self._epoch:
            if batches is not None and not self._warned_uneven:
                num_samples = progress.samples_seen - self._first_sample
                self._warned_uneven = warn_if_uneven(run, batches, self._epoch, num_samples)
            self.batches = None
        return after


def make_step(run: Run, batches: Batches) -> AfterStep:
    """Run the next step, count and check it, and log it if that is due (a collective)."""
    progress, meter = run.state.progress, run.report.meter
    meter.start()
    run.report.profile.before(progress.step + 1, meter)
    step = train_step(run, batches)
    meter.count_step(progress.step, step.losses, step.grad_norm, step.update)
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
        and step.update.has_loss
    ):
        run.ranks.heartbeat.enter("log")
        with meter.resting():
            log_first_step(run)
    return step.after


def is_over(run: Run) -> bool:
    progress, early_end = run.state.progress, run.state.early_end
    at_end = progress.step >= run.plan.total_steps or progress.epoch >= run.config.train.epochs
    return at_end or early_end.setting is not None


def unsteady_steps(run: Run) -> int:
    """Return the number of initial steps to exclude from the speed: an epoch, or 10 in a short run."""
    steps_per_epoch = run.data.train_loader.steps_per_epoch
    if steps_per_epoch is None or run.plan.total_steps - run.plan.steps_before <= steps_per_epoch:
        return 10
    return steps_per_epoch


def open_epoch(run: Run) -> Batches | None:
    """Return the rest of the epoch; if a rank has no data left, end it and return None (a collective)."""
    progress = run.state.progress
    run.ranks.heartbeat.enter("data")
    batches = run.data.train_loader.epoch(progress.epoch, progress.samples_in_epoch)
    ended, _ = run.vote.ranks_out_of_data(batches)
    if not ended:
        return batches
    if not progress.samples_in_epoch:
        where = f" on rank {first_few(ended)}" if run.data.train_loader.is_divided else ""
        raise UserError(
            f"epoch {progress.epoch} has less training data than one global batch of "
            f"{run.config.train.global_batch_size} samples{where}; lower train.global_batch_size, or add "
            "samples to the stream (with data.sharded, to its shortest shard)"
        )
    with run.guards.snapshot.change():
        progress.end_epoch()
    return None


def warn_if_uneven(run: Run, batches: Batches, epoch: int, num_samples: int) -> bool:
    """Warn if the epoch ended while some ranks had data for a step; return whether it did (a collective)."""
    ended, with_data = run.vote.ranks_out_of_data(batches)
    if with_data and run.ranks.is_main:
        log.warning(
            "epoch %d ended after %s samples, because the stream ended on rank %s. At least %s more samples "
            "of rank %s are not used. Give every rank the same number of samples, or make the stream repeat "
            "endlessly and set train.max_steps",
            *(epoch, f"{num_samples:,}", first_few(ended), run.data.split.local_size, first_few(with_data)),
        )
    return bool(with_data)


def save(run: Run) -> None:
    """Check that all replicas have the same state, and save a checkpoint (a collective)."""
    refuse_changed_by_loss(run)
    run.checkpointer.unsaved = run.guards.unsaved.compare_at_save()
    run.guards.replicas.check(run.state)
    run.report.meter.record_steps()
    with run.strategy.gathered(run.state):
        run.checkpointer.save(run.state, run.data.train_loader.state_dict())


def evaluation_due(run: Run) -> bool:
    """Return whether an evaluation is due, by `train.eval_every_*` or because the run is over."""
    progress, settings = run.state.progress, run.config.train
    if run.data.eval_loader is None:
        return False
    if settings.eval_every_steps is not None and progress.step % settings.eval_every_steps == 0:
        return True
    every = settings.eval_every_epochs
    end_of_epoch = progress.samples_in_epoch == 0 and every > 0 and progress.epoch % every == 0
    return end_of_epoch or is_over(run)


def evaluate_now(run: Run) -> tuple[dict[str, float], bool]:
    """Evaluate and log; return the metrics, and whether `checkpoint.keep_best` requires a save."""
    progress = run.state.progress
    metrics: dict[str, float] = {}
    has_average, only_average = run.state.average is not None, run.config.ema.evaluate == "ema"
    assert run.data.eval_loader is not None
    if not (has_average and only_average):
        metrics |= evaluate_as(run, run.data.eval_loader, "eval/", shows=not has_average)
    if has_average:
        with averages_in_place(run):
            prefix = "eval/" if only_average else "eval/ema/"
            metrics |= evaluate_as(run, run.data.eval_loader, prefix, shows=True)
    run.report.run_log.scalars(metrics, progress.step)
    is_best = run.checkpointer.record_evaluation(progress.step, metrics)
    values = "  ".join(f"{name.removeprefix('eval/')} {value:.4f}" for name, value in metrics.items())
    run.report.run_log.progress.line(f"eval at step {progress.step}  {values}{_best_so_far(run)}")
    with run.guards.snapshot.change():
        run.state.after_evaluation(metrics)
    return metrics, is_best


def _best_so_far(run: Run) -> str:
    if (best := run.checkpointer.best_so_far(run.state.progress.step)) is None:
        return ""
    metric, value, step = best
    if step == run.state.progress.step:
        return f"  (best {metric.removeprefix('eval/')} so far)"
    return f"  (best {metric.removeprefix('eval/')} {value:.4f} at step {step})"


def evaluate_as(run: Run, loader: EvalLoader, prefix: str, shows: bool) -> dict[str, float]:
    """Evaluate the model, log `Task.show` if `shows`, and return metrics with `prefix` (a collective)."""
    evaluation = evaluate(run.model_context, loader)
    check_metrics(run.config, evaluation.metrics)
    if shows:
        show(run.model_context, evaluation, run.report.run_log, run.state.progress.step, at_end=is_over(run))
    return {f"{prefix}{name}": value for name, value in evaluation.metrics.items()}


@contextmanager
def averages_in_place(run: Run) -> Iterator[None]:
    """Within the context, replace the model's weights with their moving averages."""
    assert run.state.average is not None
    with run.guards.snapshot.change(), run.state.average.in_place():
        run.strategy.weights_changed(run.model)
        yield
    run.strategy.weights_changed(run.model)
