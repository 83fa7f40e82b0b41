"""One optimizer step: gradients of the micro-batches, a word with the other ranks, an update.

Called by `Strategy.train_step`, so it imports none of what it is called with.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from trainer.label_weights import Divisor, divided, weight_of

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
        NonFiniteLossError: on all ranks, for a loss or a gradient; no parameter has changed.
    """
    state, strategy, heartbeat = job.state, job.strategy, job.dist.heartbeat
    step = heartbeat.step = state.progress.step + 1
    loss = torch.zeros((), device=job.dist.device)
    if not job.guard.knows_weights:
        job.guard.weigh(weights_ahead(job, batches) if strategy.trains else ())
    divisors = job.guard.divisors(strategy.num_replicas)
    strategy.begin_step()
    if strategy.trains:
        compute_gradients(job, batches, divisors, loss, tell_others=True)
    else:
        heartbeat.skip(("data", "forward", "backward"), job.batch.accumulation)
        job.guard.launch(loss, job.stop_request.is_set, batches.more)
    heartbeat.enter("optimizer")
    stop, data_left = job.guard.settle(f"step {step}")
    strategy.aggregate(job.model)

    max_norm, log_now = job.settings.clip_grad_norm, job.settings.logs(step)
    state.scaler.unscale_(state.optimizer)  # here, as a fused step would ask no other rank for an overflow
    grad_norm = strategy.grad_norm(job.model) if log_now or max_norm is not None else None
    with job.gradients.all_finite(step, state, grad_norm if max_norm is not None else None):
        if log_now:
            job.learning.before_update(step)
        if max_norm is not None and grad_norm is not None:
            nn.utils.clip_grads_with_norm_(state.model.parameters(), max_norm, grad_norm)
        job.checkpointer.wait_until_copied()
        strategy.update(state)
    if log_now:
        job.learning.after_update()
    return StepResult(loss, grad_norm, stop, data_left)


def weights_ahead(job: "Job", batches: "Batches") -> list[float]:
    """How much each micro-batch of this rank's next step counts: they are read here."""
    begin = time.perf_counter()
    weights = [weight_of(job.task, batch) for batch in batches.ahead()]
    job.meter.data_s += time.perf_counter() - begin
    return weights


def compute_gradients(
    job: "Job", batches: "Batches", divisors: Sequence[Divisor], mean_loss: Tensor, *, tell_others: bool
) -> None:
    """Add up the gradients of `job.batch.accumulation` micro-batches, and their mean loss to `mean_loss`.

    Args:
        divisors: by what the loss of each micro-batch is divided.
        tell_others: whether the other ranks are told of the loss as soon as it is known (a collective).
    """
    strategy, heartbeat, meter = job.strategy, job.dist.heartbeat, job.meter
    goes_on = job.state.progress.step + 1 < job.total_steps
    for micro_step, divisor in enumerate(divisors, start=1):
        heartbeat.enter("data")
        data_begin = time.perf_counter()
        batch = job.to_device(next(batches))
        meter.data_s += time.perf_counter() - data_begin
        last = micro_step == len(divisors)
        weights = weights_ahead(job, batches) if last and tell_others and goes_on else ()
        heartbeat.enter("forward")
        with strategy.gradient_sync(job.model, enabled=last):
            with strategy.autocast():
                loss = divided(job.task.loss(job.model, batch), divisor)
            mean_loss += loss.detach()
            meter.count_batch(job.task, batch, divisor)
            if last and tell_others:
                job.guard.launch(mean_loss, job.stop_request.is_set, batches.more, weights)
            heartbeat.enter("backward")
            job.state.scaler.scale(loss).backward()
