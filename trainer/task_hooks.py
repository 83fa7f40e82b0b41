"""Call the task's `begin_step` and `end_step`, which may change which parameters are trainable."""

import logging

import torch

from trainer.context import Run
from trainer.distributed.agreement import compare_across_ranks
from trainer.errors import UserError, first_few
from trainer.model.frozen_statistics import follow_frozen_statistics
from trainer.model.plain_names import parameter_names
from trainer.tasks.base import call_begin_step
from trainer.tensors.generators import seed_micro_batch

log = logging.getLogger(__name__)

_BEGIN, _END = -(1 << 32), -(1 << 32) - 1  # no micro-batch has these numbers, so each hook gets its own seed


def begin_step_of_task(run: Run, step: int) -> bool:
    """Call the task's `begin_step`, and return whether it froze parameters or made some trainable.

    Attributes that it sets on the task are not reported as unsaved, because each step sets them again.
    """
    task = run.task
    if getattr(task, "begin_step", None) is None:
        return False
    run.ranks.heartbeat.enter("forward")
    run.checkpointer.saving.wait_until_copied()  # begin_step may move weights that are still being copied
    seed_micro_batch(run.seed, step, _BEGIN, run.strategy.devices)
    before = dict(vars(task))
    run.strategy.weights_changed(run.model)  # reshards: the task sees shards, not whole parameters
    with run.guards.verification.weights_may_change():
        call_begin_step(task, step, run.plan.total_steps, run.state.model)
    changed = (name for name, value in vars(task).items() if value is not before.get(name, ...))
    run.guards.unsaved.ignore(changed)
    return run.state.trainable.has_changed()


def follow_begin_step(run: Run) -> bool:
    """Update the state after `begin_step` changed which parameters are trainable on any rank (a collective).

    Returns whether the caller must do a dry run, in which DDP rebuilds its buckets.
    """
    trained, step = run.state.trainable, run.ranks.heartbeat.step
    trainable = trained.trainable()
    flags = {f"requires_grad of {name}": p.requires_grad for name, p in parameter_names(run.state.model)}
    compare_across_ranks(flags, run.ranks, f"let begin_step() do the same on every rank (step {step})")
    if not trainable:
        raise UserError(
            f"the task's begin_step() froze all parameters in step {step}; at least one must stay trainable"
        )
    with run.guards.snapshot.change():
        new = run.state.follow_trainable()
    run.checkpointer.refuse_left_out(new)
    run.guards.unsaved.optimizer = run.state.optimizer
    follow_frozen_statistics(run.state.model)
    if new:
        log.info("parameters that become trainable at step %d: %s", step, first_few(new))
    return run.strategy.follow_trainable(run.model)


def refuse_changed_by_loss(run: Run) -> None:
    """Raise UserError if `loss` changed `requires_grad` after the step had been prepared."""
    changed, trainable = run.state.trainable.changed(), run.state.trainable.trainable()
    new = [name for name in changed if name in trainable]
    if new or (changed and run.strategy.uses == "all"):
        raise UserError(
            f"the loss changed requires_grad of {first_few(new or changed)} after the step had been prepared "
            "for its trainable parameters; change requires_grad in the task's "
            "begin_step(step, last_step, model) instead"
        )


def end_step_of_task(run: Run, step: int) -> None:
    """Call the task's `end_step` after the update of `step`, with the same random numbers on every rank."""
    if getattr(run.task, "end_step", None) is None:
        return
    seed_micro_batch(run.seed, step, _END, run.strategy.devices)
    run.strategy.weights_changed(run.model)  # reshards: the task sees shards, not whole parameters
    with torch.no_grad():
        run.task.end_step(run.state.model, step)
