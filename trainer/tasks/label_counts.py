"""How many labels of each micro-batch count, and the divisors of losses that follow from it."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.device import Mirrored
from trainer.errors import UserError
from trainer.local_shard import to_local
from trainer.nested import leaves
from trainer.tasks import Task

Divisor = float | Tensor | None
"""The divisor of a micro-batch's mean loss before losses are added; None: it adds nothing."""
_LEAST, _MOST = 1e-30, 1e30  # ranks compare counts in fp32, where others become 0 or infinite


def label_count(task: Task, batch: Any) -> float:
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
    except OverflowError:
        value, shown = math.inf, "a number above 1e308"
    except (TypeError, ValueError, RuntimeError):
        value, shown = math.nan, _kind(given)
    if value != 0 and not _LEAST <= value <= _MOST:
        raise UserError(
            f"{type(task).__name__}.weight gives {shown}, but must give how many labels count: 0, or from "
            f"{_LEAST:g} to {_MOST:g}"
        )
    return value


def divisors(counts: Sequence[float], total: float | Tensor) -> list[Divisor]:
    """The divisors of micro-batches with these counts of labels out of `total`."""
    return [total / count if count else None for count in counts]


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


def loss_of(
    task: Task,
    model: nn.Module,
    batch: Any,
    divisor: Divisor,
    watched: Sequence[Tensor] = (),
    *,
    is_first: bool = False,
) -> Tensor:
    """The contribution of `batch` to the loss of the step.

    Without counted labels the model's outputs get gradients of 0, also from a loss that is 0/0: the gradient
    of a division by 0 is NaN, whatever follows.

    Args:
        watched: tensors in which a step adds gradients, which `task.loss` must leave as they are. To look at
            one before and after takes 3 to 7 us.
        is_first: whether it is the first of the run, without gradients so far.

    Raises:
        UserError: `task.loss` does not return a scalar to differentiate, or changed gradients itself.
    """
    before = _gradients(watched)
    with _zero_gradients(model) if divisor is None else nullcontext():
        loss = task.loss(model, batch)
    method = f"{type(task).__name__}.loss"
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad or loss.is_complex():
        raise UserError(f"{method} returns {_kind(loss)}, but must return a scalar to differentiate, a mean")
    after = _gradients(model.parameters() if is_first else watched)  # FSDP's units are gathered from then on
    if [key for _, *key in before] != [key for _, *key in after]:
        raise UserError(
            f"{method} changes the gradients of parameters, as backward() and zero_grad() do, but they are "
            "the sum over micro-batches and ranks; return the loss, to which the trainer applies backward(), "
            "and compute gradients within it by torch.autograd.grad"
        )
    return divided(loss, divisor)


def _gradients(trained: Iterable[Tensor]) -> list[tuple[Tensor, int, int, int]]:
    """The gradients, held so that no new one gets the id of an old; whose each is, its id, its version."""
    held = [(id(tensor), gradient) for tensor in trained if (gradient := tensor.grad) is not None]
    return [(grad, whose, id(grad), _version(grad)) for whose, grad in held]


def _version(gradient: Tensor) -> int:
    return (gradient if type(gradient) is Tensor else to_local(gradient))._version


def scalar(value: Any, source: str) -> Tensor:
    """The number that a task gives, possibly in a tensor. Raises UserError if it gives something else."""
    if not isinstance(value, int | float):
        return real_tensor(value, source, ())
    return torch.tensor(float(value))


def real_tensor(value: Any, source: str, shape: tuple[int, ...] | None = None) -> Tensor:
    """The tensor that a task gives, of `shape` if set. Raises UserError if it gives something else."""
    if not isinstance(value, Tensor) or value.is_complex() or shape not in (None, value.shape):
        of = "" if shape is None else f" of shape {tuple(shape)}"
        raise UserError(f"{source} gives {_kind(value)}, but must give a tensor{of} of real numbers")
    return value


@contextmanager
def _zero_gradients(model: nn.Module) -> Iterator[None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        for leaf in leaves(output):
            own = leaf if isinstance(leaf, Tensor) else getattr(leaf, "__dict__", None)  # of any object
            for part in leaves(own):
                if isinstance(part, Tensor) and part.requires_grad:
                    part.register_hook(torch.zeros_like)

    handle = model.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    if value.ndim and not value.is_complex():
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {value.dtype} tensor" + " that requires no gradient" * (not value.requires_grad)
