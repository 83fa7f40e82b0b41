"""Checks that the loss and all gradients are finite, on every rank, before an update."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer import accelerator
from trainer.distributed.agreement import gather_objects
from trainer.errors import NonFiniteError, first_few

if TYPE_CHECKING:
    from trainer.distributed.process_group import Dist
    from trainer.optim.train_state import Progress, TrainState
    from trainer.training.kept_step import KeptBuffers

log = logging.getLogger(__name__)


class GradientCheck:
    """Guards each update: no rank makes one if the loss or gradients are NaN or Inf on any rank.

    A loss that is not finite makes gradients NaN (`step.add_gradients`), and their norm, the same on all
    ranks, tells each of them.

    A step that is left out leaves no trace in buffers either: running statistics would stay NaN.

    Args:
        limit: the numbers of a gradient beyond +-`limit` have become NaN; for the message.
        may_skip: how many steps in a row are left out, before one raises.
        buffers: of the model, to be restored then.
        bad_sample: names a sample with NaN or Inf in this rank's part of a step, if it finds one; given the
            epoch, and the first sample of the step in it.
    """

    def __init__(
        self,
        dist: "Dist",
        buffers: "KeptBuffers | None" = None,
        bad_sample: Callable[[int, int], str | None] = lambda epoch, first_sample: None,
        limit: float = math.inf,
        may_skip: int = 0,
    ) -> None:
        self._dist, self._bad_sample, self._limit, self._may_skip = dist, bad_sample, limit, may_skip
        self._buffers = buffers
        self._on_host = _HostCopy(dist.device)

    def begin_step(self) -> None:
        """Called before the first forward pass of each step."""
        if self._buffers is not None:
            self._buffers.keep()

    @contextmanager
    def around_update(
        self,
        step: int,
        state: "TrainState",
        norm: Tensor,
        losses: Sequence[Tensor] = (),
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Iterator[bool]:
        """The context of the update of `step`, which checks before it.

        Yields whether to make it: not so if the step is left out.

        On a GPU, optimizers that accept GradScaler's flag skip the update on the device. The host reads the
        norm after launching it, so that the GPU's queue does not run dry. If steps may be left out, it reads
        the norm before: averages follow only updates.

        Args:
            norm: of all gradients, a scalar, the same on every rank.
            losses: of this rank's micro-batches, for the message.
            waiting: the context of a wait for a GPU, which may be one for a rank that is gone.

        Raises:
            NonFiniteError: on every rank; no parameter has changed.
        """
        optimizer: Any = state.optimizer
        self._on_host.start(norm)

        def is_finite() -> bool:
            with nullcontext() if norm.is_cpu else waiting():
                return math.isfinite(self._on_host.read())

        if state.scaler.is_enabled():  # fp16: the scaler skips such an update itself, and lowers its scale
            is_finite()  # so that the scaler, which reads its own flag, waits for no other rank
            yield True
            return
        if self._may_skip or norm.is_cpu or not _is_read_by(optimizer, norm.device):
            if is_bad := not is_finite():
                self._leave_out(self._error(step, state, losses), step, state.progress)
            yield not is_bad
            return
        # Kept for the message, since the update frees them.
        held = [(own, own.grad) for own in state.trained.own.values()]
        found = norm.new_empty((), dtype=torch.float32)
        torch.ne(norm - norm, 0, out=found)  # NaN unless it is finite; isfinite() launches six kernels
        optimizer.found_inf, optimizer.grad_scale = found, None
        yield True
        del optimizer.found_inf, optimizer.grad_scale
        if not is_finite():
            for own, gradient in held:
                own.grad = gradient
            raise self._error(step, state, losses)

    def _leave_out(self, error: NonFiniteError, step: int, progress: "Progress") -> None:
        """Raise `error`, or restore the buffers, if the step may be left out."""
        if progress.skipped_in_a_row >= self._may_skip:
            raise error
        if self._buffers is not None:
            self._buffers.restore()
        if self._dist.is_main:
            log.warning(
                "step %d is left out, %d in a row of at most train.skip_nonfinite=%d: %s",
                *(step, progress.skipped_in_a_row + 1, self._may_skip, error),
            )

    def _error(self, step: int, state: "TrainState", losses: Sequence[Tensor]) -> NonFiniteError:
        """The error, which names a rank with such a loss, or a gradient (a collective)."""
        bad_loss = not all(math.isfinite(loss) for loss in losses)
        named = [(name, own.grad) for name, own in state.trained.own.items()]
        bad = [name for name, gradient in named if gradient is not None and not _is_finite(gradient)]
        begin = state.progress.epoch, state.progress.samples_in_epoch
        own = bad_loss, bad, self._bad_sample(*begin) if bad_loss else None
        everyones = gather_objects(own) if self._dist.world_size > 1 else [own]
        for rank, (is_bad, _, sample) in enumerate(everyones):
            if is_bad:
                look = "Lower optim.lr, set train.clip_grad_norm, or check the data of that rank"
                if sample is not None:
                    look = f"Its data has NaN or Inf itself, in {sample}: fix it, or leave it out"
                where = f"{self._dist.describe(rank)}; no rank applied that step"
                return NonFiniteError(f"the loss of step {step} is NaN or Inf on {where}. {look}", (rank,))
        found = [name for name, _ in named if any(name in theirs for _, theirs, _ in everyones)]
        what = "the norm of the gradients, each of them finite,"
        if found:
            what = f"the gradient of {first_few(found, 1)}"
        beyond = (
            f", or beyond +-{self._limit:g}, as far as train.exact counts," if self._limit < math.inf else ""
        )
        alone = self._dist.world_size == 1
        return NonFiniteError(
            f"{what} is NaN or Inf{beyond} in step {step} on "
            f"{self._dist.describe(0) if alone else 'some rank'}; no rank applied that step. Look for a root "
            "or a logarithm of 0, or a division by 0, in the model and the loss; or lower optim.lr",
            (0,) if alone and found else (),
        )


def _is_read_by(optimizer: Any, device: torch.device) -> bool:
    """Whether a fused step of `optimizer` reads the flag on `device`; torch has no public check."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    # True without gradients, too: all ranks look at the same time, a parameter server's workers, too.
    return all(
        p.grad.device == device
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    )


def _is_finite(gradient: Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.isfinite().all())


class _HostCopy:
    """The copy of a scalar on the host, made on a stream beside the current one of `device`.

    `read` waits for the copy alone, and not for what was queued behind it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream, self._made = device, accelerator.stream(device), accelerator.event(device)
        self._copy = torch.zeros((), pin_memory=accelerator.can_pin(device))

    def start(self, number: Tensor) -> None:
        """Copy `number`, of shape (), when the current stream has computed it."""
        if not accelerator.is_accelerator(number.device):
            self._copy = number
            return
        if self._copy.dtype != number.dtype:  # to convert it would take a kernel
            self._copy = torch.zeros((), dtype=number.dtype, pin_memory=accelerator.can_pin(self._device))
        self._stream.wait_stream(accelerator.current_stream(self._device))
        with accelerator.on(self._stream):
            self._copy.copy_(number, non_blocking=True)
            self._made.record()
        accelerator.keep_for(number, self._stream)

    def read(self) -> float:
        self._made.synchronize()
        return self._copy.item()
