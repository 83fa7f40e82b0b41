"""One optimizer step: gradients of the micro-batches, an agreement with the other ranks, an update."""

import time
from collections.abc import Sequence
from enum import IntEnum
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from trainer.distributed.seeding import seed_micro_batch
from trainer.tasks.label_counts import Divisor, label_count, loss_of

if TYPE_CHECKING:
    from trainer.data.loading.base import Batches
    from trainer.training.context import TrainingContext


class AfterStep(IntEnum):
    """What follows a step: the largest that any rank asks for."""

    CONTINUE = 0
    END = 1
    """The time of the run is up: it ends as after its last step."""
    STOP = 2
    """A signal came: save and stop."""


class StepResult(NamedTuple):
    """The result of a step for the loop."""

    losses: Tensor | None
    """This rank's, detached, as `SumOrder.sum_of` adds them; None if the step was left out."""
    grad_norm: Tensor | None
    """Over the whole model, if it was clipped or the step is logged."""
    after: AfterStep
    data_left: bool
    """Whether all ranks have data for another step of this epoch."""


def train_step(context: "TrainingContext", batches: "Batches") -> StepResult:
    """Make the step after `context.state.progress` (a collective).

    Raises:
        NonFiniteError: on all ranks, for a loss or a gradient, unless `train.skip_nonfinite` leaves the step
            out; no parameter has changed.
    """
    state, strategy, heartbeat = context.state, context.strategy, context.dist.heartbeat
    step = heartbeat.step = state.progress.step + 1
    if not context.agreement.knows_label_counts:
        context.agreement.agree_on_label_counts(label_counts_ahead(context, batches))
    divisors = context.agreement.divisors(
        context.batch.num_micro_batches, strategy.num_replicas, strategy.order
    )
    strategy.begin_step()
    context.checks.gradients.begin_step()
    losses = compute_gradients(context, batches, divisors, step)
    heartbeat.skip(("data", "forward", "backward"), context.batch.fewer)
    heartbeat.enter("optimizer")
    agreed = context.agreement.finish(f"step {step}")
    strategy.aggregate(context.model)
    if divisors and step == context.steps_before + 1:
        strategy.refuse_no_gradients(context.model)

    max_norm, log_now = context.settings.clip_grad_norm, context.settings.logs(step)
    state.take_gradients()
    grad_norm = strategy.grad_norm(state.trained) if log_now or max_norm is not None else None
    norm = grad_norm if max_norm is not None else None
    with context.checks.gradients.around_update(step, state, norm, agreed.not_finite) as finite:
        if log_now:
            context.weight_statistics.before_update(step)
        if max_norm is not None and grad_norm is not None:
            nn.utils.clip_grads_with_norm_(state.trained.own.values(), max_norm, grad_norm)
        context.checkpointer.wait_until_copied()
        context.gate.begin_update()  # the loop ends it, when it has counted the step
        if state.update_may_draw:  # the same numbers on replicas, others where ranks update shards
            updater = context.dist.rank if strategy.gradients_differ else 0
            seed_micro_batch(context.seed, step, -1 - updater, strategy.devices)
        strategy.update(state, finite)
    if log_now:
        context.weight_statistics.after_update()
    return StepResult(losses if finite else None, grad_norm, agreed.after, agreed.data_left)


def label_counts_ahead(context: "TrainingContext", batches: "Batches") -> list[float]:
    """Read this rank's micro-batches of the next step; return how many counted labels each has."""
    begin, task = time.perf_counter(), context.task
    size, alone = context.batch.micro_batch_size, context.batch.num_micro_batches == 1
    counts = [label_count(task, batch, size, is_alone=alone) for batch in batches.ahead()]
    context.meter.data_s += time.perf_counter() - begin
    return counts


def compute_gradients(
    context: "TrainingContext",
    batches: "Batches",
    divisors: Sequence[Divisor],
    step: int,
) -> Tensor:
    """Add the gradients of this rank's micro-batches.

    The loss is sent to the other ranks as soon as it is known (a collective).

    Args:
        divisors: the divisor of each micro-batch's loss.
        step: of the run; random numbers follow from it.

    Returns:
        Their losses, as `SumOrder.sum_of` adds them.
    """
    strategy, heartbeat, meter = context.strategy, context.dist.heartbeat, context.meter
    another_follows = context.state.progress.step + 1 < context.total_steps
    first_micro_batch = context.batch.first_micro_batch(strategy.replica)
    own_losses: list[Tensor] = []
    is_first_step = step == context.steps_before + 1
    watched = strategy.watched(context.model, step - 1 - context.steps_before)
    if not divisors:  # a parameter server's share of the batch has no micro-batches
        no_loss = torch.zeros((), device=context.dist.device)
        context.agreement.start(no_loss, context.asked(), batches.data_left)
        return no_loss
    for micro_step, divisor in enumerate(divisors, start=1):
        heartbeat.enter("data")
        data_begin = time.perf_counter()
        batch = context.to_device(next(batches))
        meter.data_s += time.perf_counter() - data_begin
        last = micro_step == len(divisors)
        looks_ahead = last and another_follows
        label_counts = label_counts_ahead(context, batches) if looks_ahead else ()
        heartbeat.enter("forward")
        seed_micro_batch(context.seed, step, first_micro_batch + micro_step - 1, strategy.devices)
        with strategy.gradient_sync(context.model, enabled=last):
            if micro_step == 1:
                context.gate.buffers_are_shared()
            with strategy.autocast():
                loss = loss_of(
                    *(context.task, context.model, batch, divisor, watched),
                    is_first=is_first_step and micro_step == 1,
                    by_value=is_first_step,
                )
            own_losses.append(loss.detach().float())
            meter.count_batch(context.task, batch, divisor)
            if last:
                own_loss = reduce(torch.add, own_losses)
                context.agreement.start(own_loss, context.asked(), batches.data_left, label_counts)
            heartbeat.enter("backward")
            context.state.scaler.scale(loss).backward()
            context.checks.frozen.drop_gradients()
    return strategy.order.sum_of(own_losses)
