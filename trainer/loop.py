"""The training loop: `fit` trains epochs and evaluates and saves between them; nothing calls back."""

import logging
import time
import warnings
from collections.abc import Iterator

from trainer.errors import StoppedBySignal, UserError
from trainer.evaluation import evaluate, show
from trainer.job import Job
from trainer.metrics import peak_memory_bytes
from trainer.optim import after_evaluation
from trainer.report import report

log = logging.getLogger(__name__)

# fp16 may skip the first update for an overflow; the schedule counts steps of data all the same.
warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")


def fit(job: Job) -> dict[str, float]:
    """Train to the last step and return the run's figures by their names in result.json.

    Raises:
        NonFiniteLossError: on all ranks at the same step, before its update.
        StoppedBySignal: on all ranks at the same step, after saving it.
    """
    progress, settings, meter = job.state.progress, job.settings, job.meter
    steps_per_epoch = job.train_loader.steps_per_epoch
    if steps_per_epoch is None or job.total_steps - progress.step <= steps_per_epoch:
        unsteady_steps = 10
    else:
        unsteady_steps = steps_per_epoch
    steady = epoch_begin = meter.mark()
    evaluation = job.checkpointer.restored_metrics
    if job.first_step and not evaluation:
        evaluation = evaluate_if_due(job)  # a signal came between the end of the epoch and this

    while not is_over(job):
        epoch_begin = meter.mark()
        for _ in train_epoch(job):
            if steady.steps == 0 and progress.step >= job.first_step + unsteady_steps:
                steady = meter.mark()
        evaluation = evaluate_if_due(job)
        if is_over(job) or job.checkpointer.due(progress, end_of_epoch=True):
            save(job, evaluation)

    job.profile.close()
    job.dist.heartbeat.enter("end")
    job.strategy.collect(job.model)
    train_loss = meter.mean_loss(epoch_begin)
    ms_per_step = meter.ms_per_step(steady)["step"]
    return {
        "steps": progress.step,
        "epochs": progress.epochs(job.train_loader.num_samples),
        "samples_seen": progress.samples_seen,
        "train/loss": train_loss,
        **evaluation,
        "samples_per_second": settings.global_batch_size / ms_per_step * 1e3,
        "ms_per_step": ms_per_step,
        "peak_memory_bytes": max(peak_memory_bytes(job.strategy.devices).values()),
    }


def train_epoch(job: Job) -> Iterator[None]:
    """Train to the end of the epoch or of the run, whichever comes first; yields after each step."""
    progress, settings, heartbeat, meter = job.state.progress, job.settings, job.dist.heartbeat, job.meter
    heartbeat.enter("data")
    epoch, batches = progress.epoch, job.train_loader.epoch(progress.epoch, progress.samples_in_epoch)
    if not job.guard.all_have(batches.more):
        skip_epoch(job)
        return
    window = meter.mark()
    job.model.train()
    meter.start()
    while progress.epoch == epoch and not is_over(job):
        job.profile.before(progress.step + 1, meter)
        result = job.strategy.train_step(job, batches)
        job.count_step(result.loss, result.data_left)
        job.checkpointer.check_once(job.state)
        job.replicas.check_if_due(job.state)
        if settings.logs(progress.step):
            log_begin = time.perf_counter()
            heartbeat.enter("log")
            report(job, meter, window, result.grad_norm)
            window = meter.mark()
            meter.rest_s += time.perf_counter() - log_begin
        goes_on = progress.epoch == epoch and not is_over(job)
        save_now = job.checkpointer.due(progress, end_of_epoch=False)
        if result.stop or (goes_on and (save_now or evaluation_due(job))):
            meter.pause()
            evaluation = None if result.stop else evaluate_if_due(job)
            if result.stop or save_now:
                save(job, evaluation)
            if result.stop:
                job.checkpointer.close()
                raise StoppedBySignal(progress.step)
            job.model.train()
            meter.start()
        yield
    meter.pause()


def is_over(job: Job) -> bool:
    progress = job.state.progress
    return progress.step >= job.total_steps or progress.epoch >= job.settings.epochs


def skip_epoch(job: Job) -> None:
    """Go on to the next epoch where what was left of this one, in smaller batches, is less than a batch.

    Raises:
        UserError: all of it is less than a batch, on some rank; on every rank alike.
    """
    progress = job.state.progress
    if not progress.samples_in_epoch:
        raise UserError(
            f"the training data of epoch {progress.epoch} ends within its first global batch of "
            f"{job.settings.global_batch_size} samples; lower train.global_batch_size, or look at the "
            "stream, with data.sharded at its shortest shard"
        )
    progress.end_epoch()


def save(job: Job, evaluation: dict[str, float] | None = None) -> None:
    """Save a checkpoint, once it is known that all replicas would save the same (a collective)."""
    job.replicas.check(job.state)
    job.strategy.collect(job.model)
    job.checkpointer.save(job.state, evaluation, job.train_loader.place())


def evaluation_due(job: Job) -> bool:
    progress, settings = job.state.progress, job.settings
    if settings.eval_every_steps is not None and progress.step % settings.eval_every_steps == 0:
        return True
    every = settings.eval_every_epochs
    end_of_epoch = progress.samples_in_epoch == 0 and every > 0 and progress.epoch % every == 0
    return end_of_epoch or is_over(job)


def evaluate_if_due(job: Job) -> dict[str, float]:
    """Evaluate at the end of the run, and after an epoch or a step to do so; otherwise return no figures.

    Returns:
        The figures by their names in result.json; they are logged, and told to the schedule.
    """
    progress = job.state.progress
    if job.eval_loader is None or not evaluation_due(job):
        return {}
    figures: dict[str, float] = {}
    for prefix in weights_to_evaluate(job):
        evaluation = evaluate(job, job.eval_loader)
        figures |= {f"{prefix}{name}": value for name, value in evaluation.figures.items()}
        if prefix == "eval/":
            show(job, evaluation, job.run_log, progress.step, at_end=is_over(job))
    job.run_log.scalars(figures, progress.step)
    job.run_log.line(f"eval at step {progress.step}  {_words(figures)}")
    after_evaluation(job.state.schedule, figures)
    return figures


def weights_to_evaluate(job: Job) -> Iterator[str]:
    """What the figures' names begin with, for each set of weights; the model has that set meanwhile."""
    average, instead = job.state.average, job.ema.evaluate == "instead"
    if average is None or not instead:
        yield "eval/"
    if average is not None:
        with average.in_place():
            job.strategy.weights_changed(job.model)
            yield "eval/" if instead else "eval/ema/"
        job.strategy.weights_changed(job.model)


def _words(values: dict[str, float]) -> str:
    return "  ".join(f"{name.removeprefix('eval/')} {value:.4f}" for name, value in values.items())
