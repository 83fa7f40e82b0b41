"""Checks that all gradients are finite, on every rank, before an update."""

import cmath
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
from trainer.local_shard import to_local
from trainer.optim.train_state import TrainState, parameter_names


class GradientCheck:
    """Guards each update: no rank makes one if gradients are NaN or Inf on any rank.

    Replicas hold the same gradients after the all-reduce, so each finds the same. Ranks that hold
    different ones all-reduce one number.

    Args:
        differ: whether ranks hold different gradients: shards, or none.
        is_to_blame: whether this rank made such a gradient; called on every rank when there is one.
        limit: the numbers of a gradient beyond +-`limit` have become NaN; for the message.
    """

    def __init__(
        self, dist_: Dist, differ: bool, is_to_blame: Callable[[], bool], limit: float = math.inf
    ) -> None:
        self._dist, self._differ, self._is_to_blame, self._limit = dist_, differ, is_to_blame, limit
        self._on_cuda = dist_.device.type == "cuda"
        if self._on_cuda:
            self._stream, self._done = torch.cuda.Stream(dist_.device), torch.cuda.Event()
            self._on_host = torch.zeros((), pin_memory=True)

    @contextmanager
    def around_update(self, step: int, state: TrainState, norm: Tensor | None) -> Iterator[None]:
        """The context of the update of `step`, which checks before it (a collective).

        On a GPU, optimizers that accept GradScaler's flag skip the update on the device, and the host reads
        the flag after launching it, so that the GPU's queue does not run dry.

        Args:
            norm: if gradients are clipped, the norm of all of them, a scalar, the same on every rank: it must
                be finite. None: each gradient is looked at.

        Raises:
            NonFiniteError: on every rank; no parameter has changed.
        """
        if state.scaler.is_enabled():  # fp16: the scaler skips such an update itself, and lowers its scale
            yield
            return
        optimizer: Any = state.optimizer
        groups = optimizer.param_groups
        # Kept for the message, since the update frees them.
        held = [(p, g) for group in groups for p in group["params"] if (g := p.grad) is not None]
        gradients = [to_local(gradient) if self._differ else gradient for _, gradient in held]
        flag = self._flag(gradients, norm)
        read = self._reader(flag)
        on_device = _is_read_by(optimizer, flag, gradients)
        if on_device:
            optimizer.found_inf, optimizer.grad_scale = flag, None
        elif read():
            self._raise_if_not_finite(step, state, held, norm)
        yield
        if on_device:
            del optimizer.found_inf, optimizer.grad_scale
            if read():
                self._raise_if_not_finite(step, state, held, norm)

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

    def _raise_if_not_finite(
        self,
        step: int,
        state: TrainState,
        held: Sequence[tuple[nn.Parameter, Tensor]],
        norm: Tensor | None,
    ) -> None:
        """Raise NonFiniteError and name a gradient (a collective if ranks hold different ones).

        Returns if the flag was wrong: on CPUs a sum of finite gradients may overflow.
        """
        names = {parameter: name for name, parameter in parameter_names(state.model)}
        bad = [names[parameter] for parameter, gradient in held if not _is_finite(gradient)]
        own = bad, self._is_to_blame()
        everyones = gather_objects(own) if self._differ else [own]
        found = list(dict.fromkeys(name for names, _ in everyones for name in names))
        if not found and norm is None:
            return
        blamed = tuple(rank for rank, (_, is_to_blame) in enumerate(everyones) if found and is_to_blame)
        what = f"the gradient of {first_few(found, 1)}"
        if not found:
            what = "the norm of the gradients, each of them finite,"
        beyond = (
            f", or beyond +-{self._limit:g}, as far as train.exact counts," if self._limit < math.inf else ""
        )
        where = " and ".join(map(self._dist.describe, blamed)) or "some rank"
        raise NonFiniteError(
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
    return bool(gradients) and all(gradient.device == flag.device for gradient in gradients)


def _is_finite(gradient: Tensor) -> bool:
    local = to_local(gradient)
    values = local.coalesce().values() if local.is_sparse else local
    return bool(values.isfinite().all())
