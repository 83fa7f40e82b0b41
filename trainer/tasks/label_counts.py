"""Counts the labels of each micro-batch, and weights its loss by them."""

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

_LEAST, _MOST = 1e-30, 1e30  # ranks compare counts in fp32, where others become 0 or infinite


def count_labels(task: Task, batch: Any, split: BatchSplit) -> float:
    """The number of counted labels of a micro-batch, by the task's `weight`; of its samples without one.

    Called before the batch is moved to the device.

    Args:
        split: of how many samples the micro-batch was made; data.collate may leave some out.

    Raises:
        UserError: it is not a number, or is neither 0 nor from 1e-30 to 1e30; or nothing tells how many
            samples there are.
    """
    if (weight := getattr(task, "weight", None)) is None:
        size, is_alone = split.micro_batch_size, split.num_micro_batches == 1
        return size if is_alone else _samples_in(batch, size, type(task).__name__)
    given = weight(batch)
    try:
        value = float(given)
        shown = str(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        value, shown = math.nan, described(given)
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


def divided(loss: Tensor, all_labels: float, label_count: float) -> Tensor:
    """The part of a micro-batch's mean loss, a scalar, in the loss of the step.

    A mean over no labels is NaN. It adds 0 but is still differentiated, since other ranks wait for this
    rank's backward pass.

    Args:
        all_labels: counted labels of the step, over all ranks; where ranks are averaged, of the mean rank.
        label_count: counted labels of the micro-batch.
    """
    if not label_count:
        return loss.nan_to_num(0.0, 0.0, 0.0) * 0
    if all_labels == label_count:  # as of one micro-batch a rank: saves two operations
        return loss
    return loss / (all_labels / label_count)


def loss_of(
    task: Task, model: nn.Module, batch: Any, label_count: float = 1
) -> tuple[Tensor, Mapping[str, Any] | None]:
    """The mean loss of a micro-batch, a scalar, and its parts by name, if the task gives any.

    Without counted labels the model's outputs get gradients of 0, also from a loss that is 0/0: the gradient
    of a division by 0 is NaN, whatever follows.
    """
    with nullcontext() if label_count else _zero_gradients(model):
        given = task.loss(model, batch)
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        return given
    return given, None  # whatever it is: the dry run looks at it


def scalar(value: Any, source: str, device: torch.device) -> Tensor:
    """The number that a task gives, possibly in a tensor. Raises UserError if it gives something else."""
    if not isinstance(value, int | float) and not real_tensor(value, source, ()).is_cpu:
        return value.to(device)
    return torch.full((), float(value), device=device)  # to copy it to a GPU would wait for that


def real_tensor(value: Any, source: str, shape: tuple[int, ...] | None = None) -> Tensor:
    """The tensor that a task gives, of `shape` if set. Raises UserError if it gives something else."""
    if not isinstance(value, Tensor) or value.is_complex() or shape not in (None, value.shape):
        of = "" if shape is None else f" of shape {tuple(shape)}"
        raise UserError(f"{source} gives {described(value)}, but must give a tensor{of} of real numbers")
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


def described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    if value.ndim and not value.is_complex():
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {value.dtype} tensor" + " that requires no gradient" * (not value.requires_grad)
