"""The training loop: `fit` trains epochs and evaluates and saves between them; nothing calls back."""

import dataclasses
import logging
import math
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trainer.data.loader import Batches
from trainer.errors import StoppedBySignal, UserError
from trainer.evaluation import evaluate, show
from trainer.guard import StepGuard
from trainer.job import Job
from trainer.metrics import Meter, peak_memory_bytes
from trainer.optim import after_evaluation
from trainer.report import report
from trainer.seeding import rng_state, set_rng_state
from trainer.state import Progress

log = logging.getLogger(__name__)

# fp16 may skip the first update for an overflow; the schedule counts steps of data all the same.
warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")


def fit(job: Job) -> dict[str, float]:
    """Train to the last step and return the run's figures by their names in result.json.

    Raises:
        NonFiniteLossError: on all ranks at the same step, before its update.
        StoppedBySignal: on all ranks at the same step, after saving it.
    """
    progress, settings = job.state.progress, job.settings
    guard, meter = StepGuard(job.dist), Meter(job.dist, job.flops, job.strategy.num_replicas)
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
        for _ in train_epoch(job, guard, meter):
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


def train_epoch(job: Job, guard: StepGuard, meter: Meter) -> Iterator[None]:
    """Train to the end of the epoch or of the run, whichever comes first; yields after each step."""
    progress, settings, heartbeat = job.state.progress, job.settings, job.dist.heartbeat
    heartbeat.enter("data")
    epoch, batches = progress.epoch, job.train_loader.epoch(progress.epoch, progress.samples_in_epoch)
    if not guard.all_have(batches.more):
        skip_epoch(job)
        return
    if progress.step == job.first_step > 0 and job.strategy.changes_after_first_step:
        warm_up(job, batches.peek())
    window = meter.mark()
    job.model.train()
    meter.start()
    while progress.epoch == epoch and not is_over(job):
        ahead = 1
        if job.strategy.updates_in_turns:  # parts are handed out for so many steps, counted from here
            ahead = steps_to_go_on(job)
            batches = job.train_loader.epoch(progress.epoch, progress.samples_in_epoch)
        heartbeat.step = progress.step + ahead
        job.profile.before(heartbeat.step, meter)
        log_now = heartbeat.step % settings.log_every_steps == 0
        loss, grad_norm, steps, stop, data_left = train_step(job, batches, guard, meter, log_now, ahead)
        for _ in range(steps):
            if job.strategy.updates_in_turns:  # who reads what, and how much of it, is known to nobody before
                data_left = leaves_a_step(job, progress)
            progress.advance(settings.global_batch_size, data_left)
            job.run_log.advance()
        meter.count_step(loss, steps)
        job.replicas.check_if_due(job.state)
        if log_now:
            log_begin = time.perf_counter()
            heartbeat.enter("log")
            report(job, meter, window, grad_norm)
            window = meter.mark()
            meter.rest_s += time.perf_counter() - log_begin
        goes_on = progress.epoch == epoch and not is_over(job)
        save_now = job.checkpointer.due(progress, end_of_epoch=False)
        if stop or (goes_on and (save_now or evaluation_due(job))):
            meter.pause()
            evaluation = None if stop else evaluate_if_due(job)
            if stop or save_now:
                save(job, evaluation)
            if stop:
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
            f"{job.settings.global_batch_size} samples; lower train.global_batch_size, or look at the stream"
        )
    progress.end_epoch()


def warm_up(job: Job, batch: Any) -> None:
    """Put a resumed strategy where its first backward pass had put it before the stop.

    A forward and backward pass on the batch to come: nothing remains but what the strategy made of it.
    """
    job.dist.heartbeat.enter("set_up")
    generators, buffers = rng_state(), [buffer.clone() for buffer in job.state.model.buffers()]
    job.model.train()
    with job.strategy.autocast():
        loss = job.task.loss(job.model, job.to_device(batch))
    job.state.scaler.scale(loss).backward()
    job.state.optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in zip(job.state.model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    set_rng_state(generators)


def train_step(
    job: Job, batches: Batches, guard: StepGuard, meter: Meter, measure: bool, ahead: int = 1
) -> tuple[Tensor, Tensor | None, int, bool, bool]:
    """Make one optimizer step; or up to `ahead`, where the strategy makes several before all ranks meet.

    Returns:
        This rank's mean loss (a detached scalar on the device; of several steps, their sum), the norm of the
        gradient over the whole model where it was clipped or the step is to be measured, how many steps were
        made, whether any rank was told to stop, and whether all have data for another step.
    """
    state, strategy, heartbeat = job.state, job.strategy, job.dist.heartbeat
    loss = torch.zeros((), device=job.dist.device)
    told = False
    if strategy.updates_in_turns:
        job.checkpointer.wait_until_copied()
        if measure:
            job.learning.before_update(heartbeat.step)
    for tells in strategy.turns(ahead, lambda: job.stop_request.is_set):
        compute_gradients(job, batches, loss, meter, guard if tells else None)
        told = tells
    if not strategy.trains:
        heartbeat.skip(("data", "forward", "backward"), job.batch.accumulation)
    if not told:
        guard.launch(loss, job.stop_request.is_set, batches.more)
    heartbeat.enter("optimizer")
    stop, data_left = guard.settle(state.progress.step + ahead)
    strategy.aggregate(job.model)

    grad_norm = None
    state.scaler.unscale_(state.optimizer)  # here, as a fused step would ask no other rank for an overflow
    if job.settings.clip_grad_norm is not None or measure:
        if measure and not strategy.updates_in_turns:
            job.learning.before_update(state.progress.step + 1)
        grad_norm = strategy.clip_grad_norm(job.model, job.settings.clip_grad_norm or math.inf)
    job.checkpointer.wait_until_copied()
    steps = strategy.update(state)
    if measure:
        job.learning.after_update()
    return loss, grad_norm, steps, stop, data_left


def compute_gradients(
    job: Job, batches: Batches, mean_loss: Tensor, meter: Meter, guard: StepGuard | None
) -> None:
    """Add up the gradients of `job.batch.accumulation` micro-batches, and their mean loss to `mean_loss`.

    `guard` is told of the loss as soon as it is known.
    """
    strategy, heartbeat = job.strategy, job.dist.heartbeat
    for micro_step in range(job.batch.accumulation):
        heartbeat.enter("data")
        data_begin = time.perf_counter()
        batch = job.to_device(next(batches))
        meter.data_s += time.perf_counter() - data_begin
        heartbeat.enter("forward")
        last = micro_step == job.batch.accumulation - 1
        with strategy.gradient_sync(job.model, enabled=last):
            with strategy.autocast():
                loss = job.task.loss(job.model, batch) / job.batch.accumulation
            mean_loss += loss.detach()
            meter.count_batch(job.task, batch, 1 / job.batch.accumulation)
            if last and guard is not None:
                guard.launch(mean_loss, job.stop_request.is_set, batches.more)
            heartbeat.enter("backward")
            job.state.scaler.scale(loss).backward()


def leaves_a_step(job: Job, progress: Progress) -> bool:
    assert job.train_loader.num_samples is not None, "a stream hands out no parts"
    return progress.leaves_a_step(job.settings.global_batch_size, job.train_loader.num_samples)


def steps_to_go_on(job: Job) -> int:
    """Steps to the next one after which all ranks meet: to log, to save, at the end of the epoch or run."""
    now, ahead = job.state.progress, dataclasses.replace(job.state.progress)
    while True:
        ahead.advance(job.settings.global_batch_size, leaves_a_step(job, ahead))
        meets = ahead.step % job.settings.log_every_steps == 0 or ahead.step == job.total_steps
        every = job.settings.eval_every_steps
        meets = meets or (every is not None and ahead.step % every == 0)
        if meets or ahead.epoch != now.epoch or job.checkpointer.due(ahead, end_of_epoch=False):
            return ahead.step - now.step


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
