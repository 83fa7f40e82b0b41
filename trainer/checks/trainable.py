"""Prepare a step for parameters that the task has frozen or made trainable."""

import logging
from typing import TYPE_CHECKING

from trainer.distributed.agreement import compare_across_ranks
from trainer.errors import UserError, first_few
from trainer.optim.frozen_statistics import follow_frozen_statistics
from trainer.optim.plain_names import parameter_names

if TYPE_CHECKING:
    from trainer.training.context import Run

log = logging.getLogger(__name__)


def follow_begin_step(run: "Run") -> bool:
    """Called if `begin_step` has frozen parameters, or made some trainable, on any rank (a collective).

    Returns:
        Whether the caller must make a dry run, in which torch lays out its buckets.

    Raises:
        UserError: on every rank, if ranks differ or no parameter is left to train.
    """
    trained, step = run.state.trained, run.ranks.heartbeat.step
    trainable = trained.trainable()
    flags = {f"requires_grad of {name}": p.requires_grad for name, p in parameter_names(run.state.model)}
    compare_across_ranks(flags, run.ranks, f"let begin_step() do the same on every rank (step {step})")
    if not trainable:
        raise UserError(f"the task's begin_step() leaves no parameter to train in step {step}")
    with run.guards.snapshot.held():
        new = run.state.follow_trainable()
    run.checkpointer.refuse_left_out(new)
    run.guards.unsaved.optimizer = run.state.optimizer
    follow_frozen_statistics(run.state.model)
    if new:
        log.info("from step %d on, %s are trained as well", step, first_few(new))
    return not run.strategy.is_ready_for({*trainable.values()}) and run.strategy.follow_trainable(run.model)


def refuse_changed_by_loss(run: "Run") -> None:
    """Raise UserError if `loss` made parameters trainable that this step does not train or average.

    Called after a loss in the dry run, and before each save. A loss that only freezes parameters may do so.
    """
    trained = run.state.trained
    if not (changed := trained.changed()):
        return
    trainable = trained.trainable()
    new = [name for name in trainable if name not in trained.whole]
    if new or not run.strategy.is_ready_for({*trainable.values()}):
        raise UserError(
            f"the loss changed requires_grad of {first_few(new or changed)}, but the step was already "
            "prepared for the parameters that it trains; change it in the task's "
            "begin_step(step, last_step, model)"
        )
