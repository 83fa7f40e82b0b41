"""Steps that ranks do not make in common: a round of them, after which all ranks meet."""

import dataclasses
import math

import torch

from trainer.data.loader import Batches
from trainer.guard import StepGuard
from trainer.job import Job
from trainer.metrics import Meter
from trainer.state import Progress
from trainer.step import Made, compute_gradients


def train_round(job: Job, batches: Batches, guard: StepGuard, meter: Meter) -> Made:
    """Make the steps up to the next at which the run is looked at as a whole, or fewer (a collective).

    Parameters change with each part of a step that a rank is done with, in an order nobody knows before.

    Raises:
        NonFiniteLossError: on all ranks, before that update.
    """
    state, strategy, heartbeat = job.state, job.strategy, job.dist.heartbeat
    ahead = steps_to_go_on(job)
    last = heartbeat.step = state.progress.step + ahead
    log_now = job.settings.logs(last)
    # The strategy hands out the parts of so many steps, counted from here.
    batches = job.train_loader.epoch(state.progress.epoch, state.progress.samples_in_epoch)
    loss = torch.zeros((), device=job.dist.device)
    job.checkpointer.wait_until_copied()
    if log_now:
        job.learning.before_update(last)
    with heartbeat.in_any_order():
        for _ in strategy.turns(ahead, lambda: job.stop_request.is_set):
            compute_gradients(job, batches, loss, meter)
        if not strategy.trains:
            heartbeat.skip(("data", "forward", "backward"), job.batch.accumulation)
    heartbeat.enter("optimizer")
    # However long a round is: no collective may wait for it, and whoever is done is ahead of who is not.
    strategy.aggregate(job.model)
    guard.launch(loss, job.stop_request.is_set, batches.more)
    stop, _ = guard.settle(last)
    grad_norm = None
    if job.settings.clip_grad_norm is not None or log_now:
        grad_norm = strategy.clip_grad_norm(job.model, job.settings.clip_grad_norm or math.inf)
    steps = strategy.update(state)
    if log_now:
        job.learning.after_update()
    before_last = dataclasses.replace(state.progress)
    for _ in range(steps - 1):
        before_last.advance(job.settings.global_batch_size, data_left=True)
    return Made(loss, grad_norm, steps, stop, leaves_a_step(job, before_last))


def leaves_a_step(job: Job, progress: Progress) -> bool:
    assert job.train_loader.num_samples is not None, "a stream hands out no parts"
    return progress.leaves_a_step(job.settings.global_batch_size, job.train_loader.num_samples)


def steps_to_go_on(job: Job) -> int:
    """Steps to the next one after which all ranks meet: to log, to save, at the end of the epoch or run."""
    now, ahead = job.state.progress, dataclasses.replace(job.state.progress)
    while True:
        ahead.advance(job.settings.global_batch_size, leaves_a_step(job, ahead))
        meets = job.settings.logs(ahead.step) or ahead.step == job.total_steps
        every = job.settings.eval_every_steps
        meets = meets or (every is not None and ahead.step % every == 0)
        if meets or ahead.epoch != now.epoch or job.checkpointer.due(ahead, end_of_epoch=False):
            return ahead.step - now.step
