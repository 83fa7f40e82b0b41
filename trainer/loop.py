"""The training loop: `fit` trains epochs and evaluates and saves between them; nothing calls back."""

import itertools
import logging
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint import Checkpointer
from trainer.config import TrainConfig
from trainer.data.batch import BatchSplit
from trainer.data.loader import EvalLoader, TrainLoader
from trainer.distributed import Dist, sum_over_ranks
from trainer.errors import StoppedBySignal
from trainer.guard import StepGuard
from trainer.loggers import RunLog
from trainer.metrics import Mark, Meter, peak_memory_bytes
from trainer.optim import after_evaluation, after_step
from trainer.replicas import ReplicaGuard
from trainer.seeding import rng_state, set_rng_state
from trainer.signals import StopRequest
from trainer.state import TrainState
from trainer.strategies import Strategy
from trainer.tasks import Task

log = logging.getLogger(__name__)

# fp16 may skip the first update for an overflow; the schedule counts steps of data all the same.
warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")


@dataclass(frozen=True)
class Job:
    """The parts of a run, put together by `run`."""

    dist: Dist
    strategy: Strategy
    task: Task
    model: nn.Module  # as the strategy wrapped it; state.model is the module within
    state: TrainState
    train_loader: TrainLoader
    eval_loader: EvalLoader | None  # None: never evaluate
    settings: TrainConfig
    batch: BatchSplit
    first_step: int  # where a resumed run goes on
    total_steps: int
    checkpointer: Checkpointer
    replicas: ReplicaGuard
    run_log: RunLog
    stop_request: StopRequest


def fit(job: Job) -> dict[str, float]:
    """Train to the last step and return the run's figures by their names in result.json.

    Raises:
        NonFiniteLossError: on all ranks at the same step, before its update.
        StoppedBySignal: on all ranks at the same step, after saving it.
    """
    progress, settings = job.state.progress, job.settings
    guard, meter = StepGuard(job.dist), Meter(job.dist)
    steps_per_epoch = job.train_loader.steps_per_epoch
    unsteady_steps = 10 if job.total_steps - progress.step <= steps_per_epoch else steps_per_epoch
    steady = epoch_begin = meter.mark()
    evaluation = job.checkpointer.restored_metrics
    if job.first_step and not evaluation:
        evaluation = evaluate_if_due(job)  # a signal came between the end of the epoch and this

    while progress.step < job.total_steps:
        epoch_begin = meter.mark()
        for _ in train_epoch(job, guard, meter):
            if progress.step == job.first_step + unsteady_steps:
                steady = meter.mark()
        evaluation = evaluate_if_due(job)
        if progress.step == job.total_steps or job.checkpointer.due(progress, end_of_epoch=True):
            save(job, evaluation)

    job.dist.heartbeat.enter("end")
    train_loss = meter.mean_loss(epoch_begin)
    ms_per_step = meter.ms_per_step(steady)["step"]
    return {
        "steps": progress.step,
        "epochs": progress.epoch + progress.samples_in_epoch / job.train_loader.num_samples,
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
    epoch, batches = progress.epoch, job.train_loader.epoch(progress.epoch, progress.samples_in_epoch)
    if progress.step == job.first_step > 0 and job.strategy.changes_after_first_step:
        batches = warm_up(job, batches)
    window = meter.mark()
    job.model.train()
    meter.start()
    while progress.epoch == epoch and progress.step < job.total_steps:
        heartbeat.step = progress.step + 1
        log_now = (progress.step + 1) % settings.log_every_steps == 0
        loss, grad_norm, stop = train_step(job, batches, guard, meter, measure_norm=log_now)
        progress.advance(settings.global_batch_size, job.train_loader.num_samples)
        meter.count_step(loss)
        job.run_log.advance()
        job.replicas.check_if_due(job.state)
        if log_now:
            log_begin = time.perf_counter()
            heartbeat.enter("log")
            report(job, meter, window, grad_norm)
            window = meter.mark()
            meter.rest_s += time.perf_counter() - log_begin
        end_of_epoch = progress.epoch != epoch
        if stop or (job.checkpointer.due(progress, end_of_epoch=False) and not end_of_epoch):
            meter.pause()
            save(job)
            if stop:
                job.checkpointer.close()
                raise StoppedBySignal(progress.step)
            meter.start()
        yield
    meter.pause()


def warm_up(job: Job, batches: Iterator[Any]) -> Iterator[Any]:
    """Put a resumed strategy where its first backward pass had put it before the stop; return `batches`.

    A forward and backward pass on the next batch, of which nothing remains but what the strategy made of it.
    """
    job.dist.heartbeat.enter("set_up")
    batch = next(batches)
    generators, buffers = rng_state(), [buffer.clone() for buffer in job.state.model.buffers()]
    job.model.train()
    with job.strategy.autocast():
        loss = job.task.loss(job.model, to_device(batch, job.dist.device, job.settings.channels_last))
    job.state.scaler.scale(loss).backward()
    job.state.optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in zip(job.state.model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    set_rng_state(generators)
    return itertools.chain([batch], batches)


def train_step(
    job: Job, batches: Iterator[Any], guard: StepGuard, meter: Meter, measure_norm: bool
) -> tuple[Tensor, Tensor | None, bool]:
    """Make one optimizer step from `job.batch.accumulation` micro-batches.

    Returns:
        This rank's mean loss (a detached scalar on the device), the norm of the gradient over the whole
        model where it was clipped or `measure_norm` asks for it, and whether any rank was told to stop.
    """
    state, strategy, heartbeat = job.state, job.strategy, job.dist.heartbeat
    mean_loss = torch.zeros((), device=job.dist.device)
    for micro_step in range(job.batch.accumulation):
        heartbeat.enter("data")
        data_begin = time.perf_counter()
        batch = to_device(next(batches), job.dist.device, job.settings.channels_last)
        meter.data_s += time.perf_counter() - data_begin
        heartbeat.enter("forward")
        last = micro_step == job.batch.accumulation - 1
        with strategy.gradient_sync(job.model, enabled=last):
            with strategy.autocast():
                loss = job.task.loss(job.model, batch) / job.batch.accumulation
            mean_loss += loss.detach()
            if last:
                guard.launch(mean_loss, job.stop_request.is_set)
            heartbeat.enter("backward")
            state.scaler.scale(loss).backward()
    heartbeat.enter("optimizer")
    stop = guard.settle(state.progress.step + 1)

    grad_norm = None
    if job.settings.clip_grad_norm is not None or measure_norm:
        state.scaler.unscale_(state.optimizer)
        grad_norm = strategy.clip_grad_norm(job.model, job.settings.clip_grad_norm or math.inf)
    job.checkpointer.wait_until_copied()
    state.scaler.step(state.optimizer)
    state.scaler.update()
    after_step(state.schedule)
    state.optimizer.zero_grad(set_to_none=True)
    return mean_loss, grad_norm, stop


def save(job: Job, evaluation: dict[str, float] | None = None) -> None:
    """Save a checkpoint, once it is known that all replicas would save the same (a collective)."""
    job.replicas.check(job.state)
    job.checkpointer.save(job.state, evaluation)


def evaluate_if_due(job: Job) -> dict[str, float]:
    """Evaluate at the end of the run, and of an epoch to evaluate after; otherwise return no figures.

    Returns:
        The figures by their names in result.json; they are logged, and told to the schedule.
    """
    progress = job.state.progress
    if job.eval_loader is None:
        return {}
    end_of_epoch = progress.samples_in_epoch == 0 and progress.epoch % job.settings.eval_every_epochs == 0
    if not end_of_epoch and progress.step < job.total_steps:
        return {}
    evaluation = evaluate(job, job.eval_loader)
    figures = {f"eval/{name}": value for name, value in evaluation.items()}
    job.run_log.scalars(figures, progress.step)
    job.run_log.line(f"eval at step {progress.step}  {_words(evaluation)}")
    after_evaluation(job.state.schedule, figures)
    return figures


@torch.no_grad()
def evaluate(job: Job, loader: EvalLoader) -> dict[str, float]:
    """Evaluate on the held-out data, every sample counted once (a collective)."""
    job.dist.heartbeat.enter("evaluate")
    job.strategy.sync_buffers(job.model)
    model = job.strategy.unwrap(job.model).eval()
    totals: Tensor | None = None
    for host_batch, is_real in loader:
        job.dist.heartbeat.enter("evaluate")
        batch = to_device(host_batch, job.dist.device, job.settings.channels_last)
        with job.strategy.autocast():
            sums = job.task.eval_sums(model, batch).double()
        # A rank that has run out of samples still takes part in the forward pass, for FSDP's gathers.
        counted = sums if is_real else torch.zeros_like(sums)
        totals = counted if totals is None else totals + counted
    assert totals is not None, "every rank is given at least one batch"
    return job.task.summarise(sum_over_ranks(totals))


def report(job: Job, meter: Meter, window: Mark, grad_norm: Tensor | None) -> None:
    """Log the steps since `window` (a collective)."""
    progress, devices = job.state.progress, job.strategy.devices
    loss = meter.mean_loss(window)  # waits for the device, so that the times below are complete
    ms = meter.ms_per_step(window)
    values: dict[str, float] = {
        "train/loss": loss,
        "train/lr": float(job.state.schedule.get_last_lr()[0]),
        "train/epoch": progress.epoch + progress.samples_in_epoch / job.train_loader.num_samples,
        "speed/samples_per_second": job.settings.global_batch_size / ms["step"] * 1e3,
        **{f"speed/ms_per_step/{part}": value for part, value in ms.items()},
        **{f"memory/peak_mib/{device}": size / 2**20 for device, size in peak_memory_bytes(devices).items()},
        **job.strategy.metrics(),
    }
    if grad_norm is not None:
        values["train/grad_norm"] = grad_norm.item()
    num_skipped = job.train_loader.num_skipped + (job.eval_loader.num_skipped if job.eval_loader else 0)
    if num_skipped:
        values["data/skipped_samples"] = num_skipped  # of this rank
    job.run_log.scalars(values, progress.step)
    job.run_log.figures(job.strategy.figures, progress.step)
    job.run_log.line(
        f"step {progress.step}/{job.total_steps}  epoch {values['train/epoch']:.2f}  loss {loss:.4f}  "
        f"lr {values['train/lr']:.2e}  {values['speed/samples_per_second']:.0f} samples/s"
    )


def to_device(batch: Any, device: torch.device, channels_last: bool) -> Any:
    """Return `batch` (tensors in tuples, lists, dicts) on `device`, asynchronously from pinned memory."""
    if isinstance(batch, Tensor):
        if channels_last and batch.ndim == 4:
            return batch.to(device, non_blocking=True, memory_format=torch.channels_last)
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device, channels_last) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device, channels_last) for value in batch)
    return batch


def _words(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in values.items())
