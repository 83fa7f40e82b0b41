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
    trained, step = run.state.trained, run.dist.heartbeat.step
    trainable = trained.trainable()
    flags = {f"requires_grad of {name}": p.requires_grad for name, p in parameter_names(run.state.model)}
    compare_across_ranks(flags, run.dist, f"let begin_step() do the same on every rank (step {step})")
    if not trainable:
        raise UserError(f"the task's begin_step() leaves no parameter to train in step {step}")
    _follow(run)
    return not run.strategy.is_ready_for({*trainable.values()}) and run.strategy.follow_trainable(run.model)


def follow_loss(run: "Run") -> None:
    """Called after the first loss of a step, which may have frozen parameters, or made some trainable.

    Raises:
        UserError: the strategy must know of the change before the forward pass.
    """
    trained = run.state.trained
    if not trained.has_changed():
        return
    if not run.strategy.is_ready_for({*trained.trainable().values()}):
        raise UserError(
            f"strategy={run.strategy.name}: the loss changed requires_grad of "
            f"{first_few(trained.changed())}, "
            f"but step {run.dist.heartbeat.step} was already prepared; change it in the task's "
            "begin_step(step, last_step, model)"
        )
    _follow(run)


def _follow(run: "Run") -> None:
    with run.gate.held():
        new = run.state.follow_trainable()
    run.checkpointer.refuse_left_out(new)
    run.checks.unsaved.optimizer = run.state.optimizer
    follow_frozen_statistics(run.state.model)
    if new:
        log.info("from step %d on, %s are trained, too", run.dist.heartbeat.step, first_few(new))
