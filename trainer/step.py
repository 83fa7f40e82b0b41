"""One optimizer step: compute gradients of the micro-batches, average them over ranks, and update weights."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.context import Run
from trainer.data.loading.loaders import Batches
from trainer.dry_run.step import dry_run_passes
from trainer.forward_backward import forward_backward
from trainer.state.progress import Update
from trainer.step_vote import AfterStep
from trainer.task_hooks import begin_step_of_task, follow_begin_step
from trainer.tasks.label_counts import count_labels, divided
from trainer.tensors.generators import seed_micro_batch
from trainer.update import apply_update, read_past


class Step(NamedTuple):
    losses: list[Tensor]
    """For each micro-batch of this rank, its part of the step's loss, a detached scalar."""
    grad_norm: Tensor
    """The norm of the gradients of the whole model, a scalar."""
    update: Update
    after: AfterStep
    """The action that all ranks take after the step."""


def train_step(run: Run, batches: Batches) -> Step:
    """Run the step that follows `run.state.progress`; see `apply_update` for errors (a collective)."""
    state, strategy, heartbeat = run.state, run.strategy, run.ranks.heartbeat
    step = heartbeat.step = state.progress.step + 1

    heartbeat.enter("data")
    with run.report.meter.reading():
        micro_batches = batches.take()  # empty on a rank that is only a parameter server
    counts = [count_labels(run.task, batch, run.data.split) for batch in micro_batches]
    trainable_changed = begin_step_of_task(run, step)
    run.vote.start(counts, run.requested_action(), batches.data_left, trainable_changed)

    if trainable_changed:
        run.vote.result()  # raises if the trainable parameters changed only on some ranks
        with run.report.meter.resting():
            if follow_begin_step(run):
                dry_run_passes(run, micro_batches)
    strategy.begin_step(run.model)
    if run.config.train.skips(step):
        agreed = run.vote.result()
        return Step([], torch.zeros((), device=strategy.device), read_past(run, step), agreed.after)
    run.guards.verification.start(step, micro_batches, lambda: run.vote.result().num_labels)
    losses = [
        add_gradients(run, batch, count, step, number)
        for number, (batch, count) in enumerate(zip(micro_batches, counts, strict=True))
    ]
    heartbeat.skip(("forward", "backward"), run.data.split.fewer)
    heartbeat.enter("data")
    if step < run.plan.total_steps:
        with run.report.meter.reading():
            run.data.to_device.ahead(batches.ahead())  # while the GPU still computes

    run.guards.verification.check(step)
    heartbeat.enter("optimizer")
    strategy.aggregate(run.model)
    if run.plan.logs(step):
        run.guards.buffers.compare([run.guards.buffers.hashes()] if losses else [])
    strategy.share_buffers(run.model)
    agreed = run.vote.result()
    state.attach_gradients()
    norm = strategy.grad_norm(state.trainable)
    run.checkpointer.saving.wait_until_copied()  # an asynchronous save must have read the weights
    update = apply_update(run, step, norm, losses)
    run.guards.verification.after_update()
    return Step(losses, norm, update, agreed.after)


def add_gradients(run: Run, batch: Any, label_count: float, step: int, number: int) -> Tensor:
    """Run the forward and backward pass of this rank's micro-batch `number` in a step.

    Returns the micro-batch's part of the step's loss, a detached scalar.
    """
    enter = run.ranks.heartbeat.enter
    loss_of_step: Tensor

    def on_loss(loss: Tensor, parts: Mapping[str, Any] | None) -> Tensor:
        nonlocal loss_of_step
        # DDP and FSDP divide the sum of gradients by the number of replicas, so the loss is divided by the
        # mean number of labels per replica. With train.exact, nothing is divided later, so the loss is
        # divided by the number of labels of all replicas.
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
    forward_backward(strategy, run.task, run.model, run.data.to_device(batch), on_loss, label_count, is_last)
    loss = loss_of_step if loss_of_step.dtype == torch.float64 else loss_of_step.float()
    # A replayed CUDA graph overwrites the memory of this loss with the next one.
    return loss.clone() if run.config.train.compile_mode == "reduce-overhead" else loss
