"""How many labels of each micro-batch count, and the divisors of losses that follow from it."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.device import Mirrored
from trainer.errors import UserError
from trainer.nested import leaves
from trainer.tasks import Task

Divisor = float | Tensor | None
"""The divisor of a micro-batch's mean loss before losses are added; None: it adds nothing."""


def weight_of(task: Task, batch: Any) -> float:
    """The number of counted labels of a micro-batch on the host; 1 if the task has no `weight`.

    Raises:
        UserError: the task's weight is negative or not finite.
    """
    if (weight := getattr(task, "weight", None)) is None:
        return 1.0
    given = weight(batch.batch if isinstance(batch, Mirrored) else batch)
    try:
        value = float(given)
        shown = str(value)
    except (TypeError, ValueError, RuntimeError):
        value, shown = math.nan, _kind(given)
    if not 0 <= value < math.inf:
        raise UserError(f"{type(task).__name__}.weight gives {shown}, but must give how many labels count")
    return value


def divisors(weights: Sequence[float], total: float | Tensor) -> list[Divisor]:
    """The divisors of micro-batches with these weights out of `total`."""
    return [total / weight if weight else None for weight in weights]


def divided(loss: Tensor, divisor: Divisor) -> Tensor:
    """The contribution of a mean loss to the loss of the step.

    The mean over no label is NaN. It adds 0 but is still differentiated, since other ranks wait for this
    rank's backward pass.
    """
    if divisor is None:
        return loss.nan_to_num(0.0, 0.0, 0.0) * 0
    if isinstance(divisor, int) and divisor == 1:  # saves two operations of a step
        return loss
    return loss / (divisor.to(loss) if isinstance(divisor, Tensor) else divisor)


def loss_of(task: Task, model: nn.Module, batch: Any, divisor: Divisor, *, is_first: bool = False) -> Tensor:
    """The contribution of `batch` to the loss of the step.

    Without counted labels the model's outputs get gradients of 0, also from a loss that is 0/0: the gradient
    of a division by 0 is NaN, whatever follows.

    Args:
        is_first: whether it is the first of the run, without gradients so far.

    Raises:
        UserError: `task.loss` does not return a scalar to differentiate, or made gradients itself.
    """
    with _zero_gradients(model) if divisor is None else nullcontext():
        loss = task.loss(model, batch)
    method = f"{type(task).__name__}.loss"
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        raise UserError(f"{method} returns {_kind(loss)}, but must return a scalar to differentiate, a mean")
    if is_first and any(parameter.grad is not None for parameter in model.parameters()):
        raise UserError(
            f"{method} calls backward() itself, and those gradients would not be divided by the number of "
            "micro-batches and ranks; return the loss, to which the trainer applies backward()"
        )
    return divided(loss, divisor)


@contextmanager
def _zero_gradients(model: nn.Module) -> Iterator[None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        for leaf in leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(torch.zeros_like)

    handle = model.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    if value.ndim:
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {value.dtype} tensor that requires no gradient"
