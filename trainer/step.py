"""One optimizer step: gradients of the micro-batches, their mean over ranks, an update."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.context import Run
from trainer.data.loading.loaders import Batches
from trainer.dry_run.step import make_dry_run
from trainer.forward_backward import forward_backward
from trainer.state.progress import Update
from trainer.step_vote import AfterStep
from trainer.task_hooks import begin_step_of_task, follow_begin_step
from trainer.tasks.label_counts import count_labels, divided
from trainer.tensors.generators import seed_micro_batch
from trainer.update import apply_update


class Step(NamedTuple):
    """What a step has computed."""

    losses: list[Tensor]
    """The losses of this rank's micro-batches, scalars, detached, which add up."""
    grad_norm: Tensor
    """The norm of the gradients of the whole model."""
    update: Update
    after: AfterStep
    """What all ranks do after the step."""


def train_step(run: Run, batches: Batches) -> Step:
    """Make the step after `run.state.progress` (a collective).

    Raises:
        NonFiniteError: on all ranks, for a loss or a gradient, unless `train.skip_nonfinite` skips the step;
            no parameter has changed.
    """
    state, strategy, heartbeat = run.state, run.strategy, run.ranks.heartbeat
    step = heartbeat.step = state.progress.step + 1

    heartbeat.enter("data")
    with run.report.meter.reading():
        micro_batches = batches.take()  # none on a rank that only serves parameters
    counts = [count_labels(run.task, batch, run.data.split) for batch in micro_batches]
    other_trained = begin_step_of_task(run, step)
    run.vote.start(counts, run.asked(), batches.data_left, other_trained)

    if other_trained:
        run.vote.result()  # raises if only some ranks changed what they train
        with run.report.meter.resting():
            if follow_begin_step(run):
                make_dry_run(run, micro_batches)
    strategy.begin_step(run.model)
    losses = [
        add_gradients(run, batch, count, step, number)
        for number, (batch, count) in enumerate(zip(micro_batches, counts, strict=True))
    ]
    heartbeat.skip(("forward", "backward"), run.data.split.fewer)
    heartbeat.enter("data")
    if step < run.plan.total_steps:
        with run.report.meter.reading():
            run.data.to_device.ahead(batches.ahead())  # while a GPU still computes

    heartbeat.enter("optimizer")
    strategy.aggregate(run.model)
    if run.plan.logs(step):
        run.guards.buffers.compare([run.guards.buffers.hashes()] if losses else [])
    strategy.share_buffers(run.model)
    agreed = run.vote.result()
    state.attach_gradients()
    norm = strategy.grad_norm(state.trainable)
    run.checkpointer.saving.wait_until_copied()  # of an asynchronous save, before the weights change
    update = apply_update(run, step, norm, losses)
    return Step(losses, norm, update, agreed.after)


def add_gradients(run: Run, batch: Any, label_count: float, step: int, number: int) -> Tensor:
    """Forward and backward of one micro-batch of this rank, the `number`-th of a step.

    Returns:
        Its part of the loss of the step, a scalar, detached.
    """
    enter = run.ranks.heartbeat.enter
    loss_of_step: Tensor

    def between(loss: Tensor, parts: Mapping[str, Any] | None) -> Tensor:
        nonlocal loss_of_step
        # DDP and FSDP divide the sum of gradients by the number of replicas, so the loss is divided by the
        # mean number of labels of a replica; with train.exact nothing is divided later, so by that of all.
        all_labels = run.vote.result().num_labels / strategy.order.mean_over(strategy.num_replicas)
        loss = divided(loss, all_labels, label_count)
        run.report.meter.count_batch(run.task, batch, parts, all_labels, label_count)
        enter("backward")
        scaled = run.state.scaler.scale(loss)
        loss_of_step = loss.detach()
        return scaled

    strategy = run.strategy
    enter("forward")
    seed_micro_batch(run.seed, step, run.data.first_micro_batch + number, strategy.devices)
    is_last = number + 1 == run.data.split.accumulation
    forward_backward(strategy, run.task, run.model, run.data.to_device(batch), between, label_count, is_last)
    made = loss_of_step if loss_of_step.dtype == torch.float64 else loss_of_step.float()
    # A replayed graph writes the next loss in the place of this one.
    return made.clone() if run.config.train.compile_mode == "reduce-overhead" else made
