"""Count the labels in micro-batches (except ignored labels), by which their losses are weighted."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.loading.batch import BatchSplit
from trainer.errors import UserError
from trainer.tasks import Task
from trainer.tasks.cross_entropy import IGNORED
from trainer.tensors.nested import leaves

_LEAST, _MOST = 1e-30, 1e30  # ranks compare counts in fp32, where numbers outside become 0 or infinite


def count_labels(task: Task, batch: Any, split: BatchSplit) -> float:
    """Return the number of counted labels of a micro-batch: the task's `weight`, or the number of samples.

    Called before the batch is moved to the device. Samples are counted in the batch, because `data.collate`
    may drop some.
    """
    if (weight := getattr(task, "weight", None)) is None:
        size, is_only_one = split.micro_batch_size, split.num_micro_batches == 1
        return size if is_only_one else _samples_in(batch, size, type(task).__name__)
    given = weight(batch)
    try:
        value = float(given)
        shown = str(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        value, shown = math.nan, described(given)
    if value != 0 and not _LEAST <= value <= _MOST:
        raise UserError(
            f"{type(task).__name__}.weight returned {shown}, but must return the number of labels that "
            f"count: 0, or from {_LEAST:g} to {_MOST:g}"
        )
    return value


def _samples_in(batch: Any, num_samples: int, task: str) -> int:
    """Return the number of rows of a batch's tensors, ignoring tensors with one row for the whole batch."""
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    way_out = (
        f"the weight of this batch's loss in the step is unknown; give {task} a method weight(batch) that "
        "returns the number of samples or labels over which its loss is averaged"
    )
    if any(leaf.dtype == torch.int64 and (leaf == IGNORED).any() for leaf in tensors):
        raise UserError(f"a batch has labels of {IGNORED}, which torch's cross-entropy ignores: {way_out}")
    rows = {len(leaf) for leaf in tensors} or {num_samples}
    if num_samples != 1:
        rows = rows - {1} or rows
    time_first = num_samples not in rows and all(leaf.shape[1:2] == (num_samples,) for leaf in tensors)
    if len(rows) > 1 or time_first:
        shapes = " and ".join(dict.fromkeys(str(tuple(leaf.shape)) for leaf in tensors))
        raise UserError(
            f"data.collate made a batch of {num_samples} samples whose tensors have the shapes {shapes}: "
            f"{way_out}"
        )
    return rows.pop()


def divided(loss: Tensor, all_labels: float, label_count: float) -> Tensor:
    """Scale the mean loss of a micro-batch, a scalar, to its part in the loss of the step.

    A mean over no labels is NaN. It becomes 0 but is still differentiated, because other ranks wait for this
    rank's backward pass.

    Args:
        all_labels: number of counted labels in the step: the total, or the mean per rank if gradients are
            averaged.
        label_count: number of counted labels in the micro-batch.
    """
    if not label_count:
        return loss.nan_to_num(0.0, 0.0, 0.0) * 0
    if all_labels == label_count:  # with one micro-batch per rank, for example: saves two operations
        return loss
    return loss / (all_labels / label_count)


def loss_of(
    task: Task, model: nn.Module, batch: Any, label_count: float = 1
) -> tuple[Tensor, Mapping[str, Any] | None]:
    """Return the mean loss of a micro-batch, a scalar, and its parts by name, or None without parts.

    Without counted labels, the gradients of the model's outputs are set to 0, because 0/0 has the gradient
    NaN.
    """
    with nullcontext() if label_count else _zero_gradients(model):
        given = task.loss(model, batch)
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        return given
    return given, None  # the dry run checks the type of the loss


def scalar(value: Any, source: str, device: torch.device) -> Tensor:
    """Return a number from a task as a scalar tensor. Raise UserError if `value` is not a real number."""
    if not isinstance(value, int | float) and not real_tensor(value, source, ()).is_cpu:
        return value.to(device)
    return torch.full((), float(value), device=device)  # copying a tensor would wait for the GPU


def real_tensor(value: Any, source: str, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return a tensor from a task. Raise UserError if it is not real, or does not have the given `shape`."""
    if not isinstance(value, Tensor) or value.is_complex() or shape not in (None, value.shape):
        of = "" if shape is None else f" of shape {tuple(shape)}"
        raise UserError(f"{source} returned {described(value)}, but must return a tensor{of} of real numbers")
    return value


@contextmanager
def _zero_gradients(model: nn.Module) -> Iterator[None]:
    """Set the gradients with respect to the outputs of `model` to 0, for forward passes in this context."""

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        for leaf in leaves(output):
            parts = leaf if isinstance(leaf, Tensor) else getattr(leaf, "__dict__", None)  # a user's object
            for part in leaves(parts):
                if isinstance(part, Tensor) and part.requires_grad:
                    part.register_hook(torch.zeros_like)

    handle = model.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def described(value: Any) -> str:
    """Return a description of `value` for an error message."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    if value.ndim and not value.is_complex():
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {value.dtype} tensor" + " that requires no gradient" * (not value.requires_grad)
