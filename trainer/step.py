"""One optimizer step: gradients of the micro-batches, a word with the other ranks, an update.

Called by `Strategy.train_step`, so it imports none of what it is called with.
"""

import math
import time
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from trainer.data.loader import Batches
    from trainer.job import Job


class StepResult(NamedTuple):
    """What the loop has to know of a step."""

    loss: Tensor
    """This rank's mean, a detached scalar on the device."""
    grad_norm: Tensor | None
    """Over the whole model, where it was clipped or the step is logged."""
    stop: bool
    """Whether any rank was told to stop."""
    data_left: bool
    """Whether all ranks have data for another step of this epoch."""


def train_step(job: "Job", batches: "Batches") -> StepResult:
    """Make the step after `job.state.progress` (a collective).

    Raises:
        NonFiniteLossError: on all ranks, before the update.
    """
    state, strategy, heartbeat = job.state, job.strategy, job.dist.heartbeat
    step = heartbeat.step = state.progress.step + 1
    loss = torch.zeros((), device=job.dist.device)
    strategy.begin_step()
    if strategy.trains:
        compute_gradients(job, batches, loss, tell_others=True)
    else:
        heartbeat.skip(("data", "forward", "backward"), job.batch.accumulation)
        job.guard.launch(loss, job.stop_request.is_set, batches.more)
    heartbeat.enter("optimizer")
    stop, data_left = job.guard.settle(step)
    strategy.aggregate(job.model)

    grad_norm = None
    log_now = job.settings.logs(step)
    state.scaler.unscale_(state.optimizer)  # here, as a fused step would ask no other rank for an overflow
    if job.settings.clip_grad_norm is not None or log_now:
        if log_now:
            job.learning.before_update(step)
        grad_norm = strategy.clip_grad_norm(job.model, job.settings.clip_grad_norm or math.inf)
    job.checkpointer.wait_until_copied()
    strategy.update(state)
    if log_now:
        job.learning.after_update()
    return StepResult(loss, grad_norm, stop, data_left)


def compute_gradients(job: "Job", batches: "Batches", mean_loss: Tensor, *, tell_others: bool) -> None:
    """Add up the gradients of `job.batch.accumulation` micro-batches, and their mean loss to `mean_loss`.

    `tell_others`: whether the other ranks are told of the loss as soon as it is known (a collective).
    """
    strategy, heartbeat, meter = job.strategy, job.dist.heartbeat, job.meter
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
            if last and tell_others:
                job.guard.launch(mean_loss, job.stop_request.is_set, batches.more)
            heartbeat.enter("backward")
            job.state.scaler.scale(loss).backward()
