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
from trainer.tasks.base import refuse_own_parameters
from trainer.tasks.cross_entropy import IGNORED

Divisor = float | Tensor | None
"""The divisor of a micro-batch's mean loss before losses are added; an int if all counts are equal. None: the
micro-batch has no counted label, and adds nothing."""
_LEAST, _MOST = 1e-30, 1e30  # ranks compare counts in fp32, where others become 0 or infinite


def label_count(task: Task, batch: Any, num_samples: int, *, is_alone: bool = False) -> float:
    """The number of counted labels of a micro-batch, by the task's `weight`; of its samples without one.

    Called before the batch is moved to the device.

    Args:
        num_samples: of which the micro-batch was made; data.collate may leave some out.
        is_alone: whether a step has no other micro-batch.

    Raises:
        UserError: it is not a number, or is neither 0 nor from 1e-30 to 1e30; or nothing tells how many
            samples there are.
    """
    batch = batch.batch if isinstance(batch, Mirrored) else batch
    if (weight := getattr(task, "weight", None)) is None:
        return num_samples if is_alone else _samples_in(batch, num_samples, type(task).__name__)
    given = weight(batch)
    try:
        value = float(given)
        shown = str(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        value, shown = math.nan, _described(given)
    if value != 0 and not _LEAST <= value <= _MOST:
        raise UserError(
            f"{type(task).__name__}.weight gives {shown}, but must give how many labels count: 0, or from "
            f"{_LEAST:g} to {_MOST:g}"
        )
    return value


def _samples_in(batch: Any, num_samples: int, task: str) -> int:
    """The rows of a batch's tensors; a single row among others is of the batch as a whole."""
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    way_out = (
        f"its share of the loss of a step is not known; give {task} a method weight(batch) that returns how "
        "many samples or labels the mean of its loss is over"
    )
    if any(leaf.dtype == torch.int64 and (leaf == IGNORED).any() for leaf in tensors):
        raise UserError(
            f"a batch has labels of {IGNORED}, which torch's cross-entropy leaves out of its mean: {way_out}"
        )
    rows = {len(leaf) for leaf in tensors} or {num_samples}
    if num_samples != 1:
        rows = rows - {1} or rows
    time_first = num_samples not in rows and all(leaf.shape[1:2] == (num_samples,) for leaf in tensors)
    if len(rows) > 1 or time_first:
        found = " and ".join(dict.fromkeys(str(tuple(leaf.shape)) for leaf in tensors))
        raise UserError(
            f"data.collate made a batch of {num_samples} samples whose tensors have the shapes {found}: "
            f"{way_out}"
        )
    return rows.pop()


def divisors(counts: Sequence[float], total: float | Tensor) -> list[Divisor]:
    """The divisor of each micro-batch; `total` is the sum of the `counts` of all ranks."""
    return [total / count if count else None for count in counts]


def divided(loss: Tensor, divisor: Divisor) -> Tensor:
    """The contribution of a micro-batch's mean loss, a scalar, to the loss of the step.

    A mean over no labels is NaN. It adds 0 but is still differentiated, since other ranks wait for this
    rank's backward pass.
    """
    if divisor is None:
        return loss.nan_to_num(0.0, 0.0, 0.0) * 0
    if isinstance(divisor, int) and divisor == 1:  # as of one micro-batch a rank: saves two operations
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
    by_value: bool = False,
) -> Tensor:
    """The contribution of a micro-batch to the loss of the step, a scalar to be differentiated.

    Without counted labels the model's outputs get gradients of 0, also from a loss that is 0/0: the gradient
    of a division by 0 is NaN, whatever follows.

    Args:
        watched: parameters whose gradients `task.loss` must leave as they are. To look at one before and
            after takes 3 to 7 us.
        is_first: whether it is the first micro-batch of the run: no parameter may then have a gradient.
        by_value: whether to compare sums of these gradients, too, since a change through `grad.data` leaves
            no other trace. It waits for the device.

    Raises:
        UserError: `task.loss` does not return a scalar to differentiate, changed gradients itself, or made
            parameters.
    """
    before = _gradients(watched, by_value)
    method = f"{type(task).__name__}.loss"
    with _zero_gradients(model) if divisor is None else nullcontext():
        loss = task.loss(model, batch)
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad or loss.is_complex():
        raise UserError(
            f"{method} returns {_described(loss)}, but must return a scalar to differentiate, a mean"
        )
    # FSDP gathers units in the first forward pass: only then `model` has these parameters.
    after = _gradients(model.parameters() if is_first else watched, by_value)
    if [key for _, *key in before] != [key for _, *key in after]:
        raise UserError(
            f"{method} changes the gradients of parameters, as backward() and zero_grad() do, but they are "
            "the sum over micro-batches and ranks; return the loss, to which the trainer applies backward(), "
            "and compute gradients within it by torch.autograd.grad"
        )
    if is_first:
        refuse_own_parameters(task, {id(tensor) for tensor in (*model.parameters(), *watched)})
    return divided(loss, divisor)


def _gradients(trained: Iterable[Tensor], by_value: bool) -> list[tuple[Tensor, int, int, int, str]]:
    """Of each gradient: itself, so that its id is not given again; its tensor's id, its own; version, sum."""
    found = []
    for tensor in trained:
        if (gradient := tensor.grad) is not None:
            own = gradient if type(gradient) is Tensor else to_local(gradient)
            total = repr(own.sum().item()) if by_value else ""  # as text, in which NaN equals NaN
            found.append((gradient, id(tensor), id(gradient), own._version, total))
    return found


def scalar(value: Any, source: str, device: torch.device) -> Tensor:
    """The number that a task gives, possibly in a tensor. Raises UserError if it gives something else."""
    if not isinstance(value, int | float):
        return real_tensor(value, source, ()).to(device)
    return torch.full((), float(value), device=device)


def real_tensor(value: Any, source: str, shape: tuple[int, ...] | None = None) -> Tensor:
    """The tensor that a task gives, of `shape` if set. Raises UserError if it gives something else."""
    if not isinstance(value, Tensor) or value.is_complex() or shape not in (None, value.shape):
        of = "" if shape is None else f" of shape {tuple(shape)}"
        raise UserError(f"{source} gives {_described(value)}, but must give a tensor{of} of real numbers")
    return value


@contextmanager
def _zero_gradients(model: nn.Module) -> Iterator[None]:
    """Within it, the outputs of each forward pass of `model` get gradients of 0."""

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        for leaf in leaves(output):
            held = leaf if isinstance(leaf, Tensor) else getattr(leaf, "__dict__", None)  # of a user's object
            for part in leaves(held):
                if isinstance(part, Tensor) and part.requires_grad:
                    part.register_hook(torch.zeros_like)

    handle = model.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    if value.ndim and not value.is_complex():
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {value.dtype} tensor" + " that requires no gradient" * (not value.requires_grad)
