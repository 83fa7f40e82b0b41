"""The update of a step, after its gradients are complete."""

import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer import accelerator
from trainer.context import Run
from trainer.errors import NonFiniteError
from trainer.non_finite import non_finite_error
from trainer.state.progress import Update
from trainer.task_hooks import end_step_of_task
from trainer.tensors.generators import seed_micro_batch
from trainer.torch_private import skipped_on_device, skips_on_device

log = logging.getLogger(__name__)

_MAX_OVERFLOWS = 50  # steps in a row; the loss scale starts at 2**16, and each overflow halves it


def apply_update(run: Run, step: int, norm: Tensor, losses: Sequence[Tensor]) -> Update:
    """Check and clip the gradients, step the optimizer, and advance the schedule, average and counters.

    Call on every rank when the gradients of `step` are complete (a collective). A NaN or Inf loss makes the
    gradients of all ranks NaN (see `forward_backward`), so all ranks get the same `norm` of all gradients.

    On a GPU, an optimizer that can skip its update by a flag on the device is launched before the CPU waits
    for the norm, so that the GPU does not idle. With `train.skip_nonfinite` the CPU waits first, because the
    moving average must not include a skipped update.

    Raises:
        NonFiniteError: a loss or gradient is NaN or Inf; raised on every rank, before any parameter changes.
    """
    state, strategy, settings = run.state, run.strategy, run.config.train
    statistics = run.report.weight_statistics.around_update(step, run.plan.logs(step))
    with statistics, run.guards.snapshot.update(step):  # under ddp, nothing here waits for another rank
        on_host, copied = norm.to("cpu", non_blocking=True), accelerator.event(norm.device)
        copied.record()

        def check() -> Update:
            with run.guards.snapshot.waiting():
                copied.synchronize()
            return Update.MADE if math.isfinite(on_host) else _skip(run, step, losses)

        waits_later = _may_wait_later(run, norm)
        update = Update.MADE if waits_later else check()
        if update is Update.MADE:
            if settings.clip_grad_norm is not None:
                nn.utils.clip_grads_with_norm_(state.trainable.own.values(), settings.clip_grad_norm, norm)
            if state.update_may_draw:  # the same random numbers on replicas, but not on ranks with shards
                updater = run.ranks.rank if strategy.gradients_differ else 0
                seed_micro_batch(run.seed, step, -1 - updater, strategy.devices)
            with _skipped_unless_finite(state.optimizer, norm) if waits_later else nullcontext():
                state.optimizer.step()
            strategy.share_updates()
        if waits_later:
            update = check()
        state.trainable.drop_gradients()
        state.scaler.update()
        _count(run, step, update)
    return update


def read_past(run: Run, step: int) -> Update:
    """Advance the schedule and the counters past a step in `train.skip_steps`, as for any skipped step."""
    if run.ranks.is_main:
        for first, last in run.config.train.skip_steps:
            if step == max(first, run.plan.steps_before + 1) <= last:
                steps = f"step {step}" if step == last else f"steps {step} to {last}"
                log.info("skipping %s (train.skip_steps): samples are read without an update", steps)
    with run.guards.snapshot.update(step):
        _count(run, step, Update.READ_PAST)
    return Update.READ_PAST


def _count(run: Run, step: int, update: Update) -> None:
    is_made = update is Update.MADE
    run.state.count_update(is_made)
    if is_made:
        end_step_of_task(run, step)
    if run.guards.kept_buffers is not None:
        run.guards.kept_buffers.keep()
    data_left = run.vote.result().data_left
    run.state.progress.advance(run.config.train.global_batch_size, data_left, update)


def _skip(run: Run, step: int, losses: Sequence[Tensor]) -> Update:
    """Skip the update, or raise an error if too many in a row were skipped (a collective)."""
    progress, max_skipped = run.state.progress, run.config.train.skip_nonfinite
    in_a_row = progress.skipped_in_a_row + 1
    if run.state.scaler.is_enabled():
        if in_a_row >= _MAX_OVERFLOWS:
            raise NonFiniteError(
                f"train.precision=fp16: {in_a_row} steps in a row, up to step {step}, were skipped because "
                f"of NaN or Inf gradients; the loss scale is now {run.state.scaler.get_scale():.2g}. Look "
                "for a square root or logarithm of 0, or a division by 0; or use train.precision=bf16"
            )
        return Update.OVERFLOW
    error = non_finite_error(run, step, losses)
    if in_a_row > max_skipped:
        run.report.meter.record_steps()  # every rank is here, and no later log step will record them
        raise error
    if run.guards.kept_buffers is not None:
        run.guards.kept_buffers.restore()  # otherwise running statistics would stay NaN
    if run.ranks.is_main:
        log.warning(
            "skipped step %d (%d in a row, at most train.skip_nonfinite=%d): %s",
            *(step, in_a_row, max_skipped, error),
        )
    return Update.SKIPPED


def _may_wait_later(run: Run, norm: Tensor) -> bool:
    """Return whether the optimizer may be launched before the norm is known: it can skip on the GPU."""
    if norm.is_cpu or run.config.train.skip_nonfinite or run.state.scaler.is_enabled():
        return False
    return len(run.strategy.devices) == 1 and skips_on_device(run.state.optimizer)


def _skipped_unless_finite(optimizer: Optimizer, norm: Tensor) -> AbstractContextManager:
    """Within the context, make `optimizer.step()` change nothing if `norm` is NaN or Inf."""
    found_inf = norm.new_empty((), dtype=torch.float32)
    torch.ne(norm - norm, 0, out=found_inf)  # NaN unless finite; isfinite() would launch six kernels
    return skipped_on_device(optimizer, found_inf)
