"""Calls the task's `begin_step` and `end_step`, and follows what they freeze or make trainable."""

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

_BEGIN, _END = -(1 << 32), -(1 << 32) - 1  # in place of a micro-batch's number: random numbers of their own


def begin_step_of_task(run: Run, step: int) -> bool:
    """Called before the first micro-batch of `step`, and in the dry run.

    What the method sets on the task is no state that a checkpoint should hold: each step sets it again.

    Returns:
        Whether it has frozen parameters of the model, or made some trainable.
    """
    task = run.task
    if getattr(task, "begin_step", None) is None:
        return False
    run.ranks.heartbeat.enter("forward")
    run.checkpointer.saving.wait_until_copied()  # begin_step may move weights that are still being copied
    seed_micro_batch(run.seed, step, _BEGIN, run.strategy.devices)
    before = dict(vars(task))
    run.strategy.weights_changed(run.model)  # so that parameters are the shards, and not copies of the whole
    call_begin_step(task, step, run.plan.total_steps, run.state.model)
    run.guards.unsaved.ignore(name for name, now in vars(task).items() if now is not before.get(name, ...))
    return run.state.trainable.has_changed()


def follow_begin_step(run: Run) -> bool:
    """Called if `begin_step` has frozen parameters, or made some trainable, on any rank (a collective).

    Returns:
        Whether the caller must make a dry run, in which torch lays out its buckets.

    Raises:
        UserError: on every rank, if ranks differ or no parameter is left to train.
    """
    trained, step = run.state.trainable, run.ranks.heartbeat.step
    trainable = trained.trainable()
    flags = {f"requires_grad of {name}": p.requires_grad for name, p in parameter_names(run.state.model)}
    compare_across_ranks(flags, run.ranks, f"let begin_step() do the same on every rank (step {step})")
    if not trainable:
        raise UserError(f"the task's begin_step() leaves no parameter to train in step {step}")
    with run.guards.snapshot.change():
        new = run.state.follow_trainable()
    run.checkpointer.refuse_left_out(new)
    run.guards.unsaved.optimizer = run.state.optimizer
    follow_frozen_statistics(run.state.model)
    if new:
        log.info("from step %d on, %s are trained as well", step, first_few(new))
    return run.strategy.follow_trainable(run.model)


def refuse_changed_by_loss(run: Run) -> None:
    """Raise UserError if `loss` made parameters trainable that this step does not train or average.

    Called after a loss in the dry run, and before each save. A loss that only freezes parameters may do so.
    """
    changed, trainable = run.state.trainable.changed(), run.state.trainable.trainable()
    new = [name for name in changed if name in trainable]
    if new or (changed and run.strategy.uses == "all"):
        raise UserError(
            f"the loss changed requires_grad of {first_few(new or changed)}, but the step was already "
            "prepared for the parameters that it trains; change it in the task's "
            "begin_step(step, last_step, model)"
        )


def end_step_of_task(run: Run, step: int) -> None:
    """Called after the update of `step`, on every rank with the same random numbers."""
    if getattr(run.task, "end_step", None) is None:
        return
    seed_micro_batch(run.seed, step, _END, run.strategy.devices)
    run.strategy.weights_changed(run.model)  # so that parameters are the shards, and not copies of the whole
    with torch.no_grad():
        run.task.end_step(run.state.model, step)
