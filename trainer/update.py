"""The update of a step: from complete gradients to new weights, or to an error on every rank."""

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

_MAX_OVERFLOWS = 50  # steps in a row; the loss scale begins at 2**16, and each halves it


def apply_update(run: Run, step: int, norm: Tensor, losses: Sequence[Tensor]) -> Update:
    """Check the gradients, clip them, step the optimizer, and advance schedule, average and counters.

    Call on every rank, when the gradients of `step` are complete (a collective). A loss that is NaN or Inf
    makes the gradients of all ranks NaN (see `forward_backward`), so the norm tells each rank the same.

    On a GPU the host waits for the norm. If the optimizer reads on the device whether to change anything, the
    host launches the update before it waits, so that the GPU's queue does not run dry. It waits first if
    steps may be skipped, because the average follows only updates that were made.

    Args:
        norm: the norm of the gradients of the whole model, a scalar, the same on every rank.
        losses: the losses of this rank's micro-batches, for the message.

    Raises:
        NonFiniteError: on every rank; no parameter has changed.
    """
    state, strategy, settings = run.state, run.strategy, run.config.train
    statistics = run.report.weight_statistics.around_update(step, run.plan.logs(step))
    with statistics, run.guards.snapshot.update(step):  # within the snapshot, ddp waits for no rank
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
            if state.update_may_draw:  # the same numbers on replicas, others where ranks update shards
                updater = run.ranks.rank if strategy.gradients_differ else 0
                seed_micro_batch(run.seed, step, -1 - updater, strategy.devices)
            with _skipped_unless_finite(state.optimizer, norm) if waits_later else nullcontext():
                state.optimizer.step()
            strategy.share_updates()
        if waits_later:
            update = check()
        is_made = update is Update.MADE
        state.trainable.drop_gradients()
        state.scaler.update()
        state.count_update(is_made)
        if is_made:
            end_step_of_task(run, step)
        if run.guards.kept_buffers is not None:
            run.guards.kept_buffers.keep()
        data_left = run.vote.result().data_left
        state.progress.advance(settings.global_batch_size, data_left, is_made)
    return update


def _skip(run: Run, step: int, losses: Sequence[Tensor]) -> Update:
    """Skip the update, or raise if that happens too often in a row (a collective)."""
    progress, max_skipped = run.state.progress, run.config.train.skip_nonfinite
    in_a_row = progress.skipped_in_a_row + 1
    if run.state.scaler.is_enabled():
        if in_a_row >= _MAX_OVERFLOWS:
            raise NonFiniteError(
                f"train.precision=fp16: {in_a_row} steps in a row, up to {step}, made no update, for "
                f"gradients that are NaN or Inf; the loss scale is {run.state.scaler.get_scale():.2g} now. "
                "Look for a root or a logarithm of 0, or a division by 0; or use train.precision=bf16"
            )
        return Update.OVERFLOW
    error = non_finite_error(run, step, losses)
    if in_a_row > max_skipped:
        raise error
    if run.guards.kept_buffers is not None:
        run.guards.kept_buffers.restore()  # running statistics would stay NaN
    if run.ranks.is_main:
        log.warning(
            "step %d is skipped, %d in a row of at most train.skip_nonfinite=%d: %s",
            *(step, in_a_row, max_skipped, error),
        )
    return Update.SKIPPED


def _may_wait_later(run: Run, norm: Tensor) -> bool:
    """Return whether every step makes an update, and the optimizer itself reads a flag on the GPU."""
    if norm.is_cpu or run.config.train.skip_nonfinite or run.state.scaler.is_enabled():
        return False
    return len(run.strategy.devices) == 1 and skips_on_device(run.state.optimizer)


def _skipped_unless_finite(optimizer: Optimizer, norm: Tensor) -> AbstractContextManager:
    """Within, a step of `optimizer` changes nothing if `norm` is NaN or Inf."""
    found = norm.new_empty((), dtype=torch.float32)
    torch.ne(norm - norm, 0, out=found)  # NaN unless it is finite; isfinite() launches six kernels
    return skipped_on_device(optimizer, found)
