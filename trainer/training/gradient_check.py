"""Checks that all gradients are finite, on every rank, before an update."""

import cmath
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.distributed.agreement import gather_objects
from trainer.distributed.process_group import Dist
from trainer.errors import NonFiniteError, first_few
from trainer.optim.train_state import Progress, TrainState
from trainer.training.kept_buffers import KeptBuffers

log = logging.getLogger(__name__)


class GradientCheck:
    """Guards each update: no rank makes one if the loss or gradients are NaN or Inf on any rank.

    Replicas hold the same gradients after the all-reduce, so each finds the same. Ranks that hold
    different ones all-reduce one number.

    A step that is left out leaves no trace in buffers either: running statistics would stay NaN.

    Args:
        differ: whether ranks hold different gradients: shards, or none.
        is_to_blame: whether this rank made such a gradient; called on every rank when there is one.
        limit: the numbers of a gradient beyond +-`limit` have become NaN; for the message.
        may_skip: how many steps in a row are left out, before one raises.
        model: whose buffers to restore then.
    """

    def __init__(
        self,
        dist_: Dist,
        differ: bool,
        is_to_blame: Callable[[], bool],
        limit: float = math.inf,
        may_skip: int = 0,
        model: nn.Module | None = None,
    ) -> None:
        self._dist, self._differ, self._is_to_blame, self._limit = dist_, differ, is_to_blame, limit
        self._may_skip = may_skip
        self._buffers = KeptBuffers(model) if may_skip and model is not None else None
        self._on_cuda = dist_.device.type == "cuda"
        if self._on_cuda:
            self._stream, self._done = torch.cuda.Stream(dist_.device), torch.cuda.Event()
            self._on_host = torch.zeros((), pin_memory=True)

    def begin_step(self) -> None:
        """Called before the first forward pass of each step."""
        if self._buffers is not None:
            self._buffers.keep()

    @contextmanager
    def around_update(
        self, step: int, state: TrainState, norm: Tensor | None, error: NonFiniteError | None = None
    ) -> Iterator[bool]:
        """The context of the update of `step`, which checks before it (a collective).

        Yields whether to make it: not so if the step is left out.

        On a GPU, optimizers that accept GradScaler's flag skip the update on the device, and the host reads
        the flag after launching it, so that the GPU's queue does not run dry. If steps may be left out, it
        reads the flag before: averages follow only updates.

        Args:
            norm: if gradients are clipped, the norm of all of them, a scalar, the same on every rank: it must
                be finite. None: each gradient is looked at.
            error: of a loss that is not finite, the same on every rank.

        Raises:
            NonFiniteError: on every rank; no parameter has changed.
        """
        if error is not None:
            self._leave_out(step, error, state.progress)
            yield False
            return
        if state.scaler.is_enabled():  # fp16: the scaler skips such an update itself, and lowers its scale
            yield True
            return
        optimizer: Any = state.optimizer
        groups = optimizer.param_groups
        # Kept for the message, since the update frees them.
        held = [(p, g) for group in groups for p in group["params"] if (g := p.grad) is not None]
        gradients = [gradient for _, gradient in held]
        flag = self._flag(gradients, norm)
        read = self._reader(flag)
        on_device = not self._may_skip and _is_read_by(optimizer, flag, gradients)
        if on_device:
            optimizer.found_inf, optimizer.grad_scale = flag, None
        elif read() and (error := self._error(step, state, held, norm)) is not None:
            self._leave_out(step, error, state.progress)
        yield error is None
        if on_device:
            del optimizer.found_inf, optimizer.grad_scale
            if read() and (error := self._error(step, state, held, norm)) is not None:
                raise error

    def _leave_out(self, step: int, error: NonFiniteError, progress: Progress) -> None:
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

    def _flag(self, gradients: Sequence[Tensor], norm: Tensor | None) -> bool | Tensor:
        """Whether a gradient of any rank, or on CPUs their sum, is not finite; on a GPU as 1.0 or 0.0."""
        number = _overall(gradients) if norm is None else norm
        flag: bool | Tensor = _as_flag(number) if self._on_cuda else not cmath.isfinite(number)
        if self._differ and norm is None:
            shared = torch.as_tensor(flag, dtype=torch.float32, device=self._dist.device)
            dist.all_reduce(shared, dist.ReduceOp.MAX)
            flag = shared if self._on_cuda else bool(shared)
        return flag

    def _reader(self, flag: bool | Tensor) -> Callable[[], bool]:
        """A function that reads the flag on the host, without waiting for later work of a GPU."""
        if not isinstance(flag, Tensor) or not flag.is_cuda:
            return lambda: bool(flag)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._on_host.copy_(flag, non_blocking=True)
            self._done.record()
        flag.record_stream(self._stream)

        def read() -> bool:
            self._done.synchronize()
            return bool(self._on_host)

        return read

    def _error(
        self,
        step: int,
        state: TrainState,
        held: Sequence[tuple[nn.Parameter, Tensor]],
        norm: Tensor | None,
    ) -> NonFiniteError | None:
        """The error, which names a gradient (a collective if ranks hold different ones).

        None if the flag was wrong: on CPUs a sum of finite gradients may overflow.
        """
        bad = [state.trained.names[own] for own, gradient in held if not _is_finite(gradient)]
        own = bad, self._is_to_blame()
        everyones = gather_objects(own) if self._differ else [own]
        found = [name for name in state.trained.own if any(name in theirs for theirs, _ in everyones)]
        if not found and norm is None:
            return None
        blamed = tuple(rank for rank, (_, is_to_blame) in enumerate(everyones) if found and is_to_blame)
        what = f"the gradient of {first_few(found, 1)}"
        if not found:
            what = "the norm of the gradients, each of them finite,"
        beyond = (
            f", or beyond +-{self._limit:g}, as far as train.exact counts," if self._limit < math.inf else ""
        )
        where = " and ".join(map(self._dist.describe, blamed)) or "some rank"
        return NonFiniteError(
            f"{what} is NaN or Inf{beyond} in step {step} on {where}; no rank applied that step. "
            "Look for a root or a logarithm of 0, or a division by 0, in the model and the loss; or lower "
            "optim.lr",
            blamed,
        )


def _overall(gradients: Sequence[Tensor]) -> complex | Tensor:
    """A number that is not finite if any element is not, or on CPUs, if a sum overflows."""
    if all(gradient.is_cpu for gradient in gradients):  # takes a third of the time of a norm
        return sum([gradient.sum().item() for gradient in gradients])
    return nn.utils.get_total_norm(gradients, math.inf)


def _as_flag(number: complex | Tensor) -> Tensor:
    return (~torch.as_tensor(number).isfinite()).float()


def _is_read_by(optimizer: Any, flag: bool | Tensor, gradients: Sequence[Tensor]) -> bool:
    """Whether a fused step of `optimizer` reads the flag on the device; torch has no public check."""
    if not isinstance(flag, Tensor) or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    # Also without gradients: all ranks look at the same time, a parameter server's workers, too.
    return all(gradient.device == flag.device for gradient in gradients)


def _is_finite(gradient: Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.isfinite().all())
