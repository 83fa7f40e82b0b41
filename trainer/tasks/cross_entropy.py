"""Cross entropy that names a label outside the model's classes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.accelerator import is_accelerator
from trainer.errors import UserError

_TAKEN_BY_TORCH = (torch.int64, torch.uint8)
IGNORED = -100  # torch's value for a label that does not count


def inputs_and_labels(batch: Any) -> tuple[Any, Tensor]:
    """The two parts of a batch.

    Raises:
        UserError: it has other parts, or its labels are not a tensor, as those of text are not.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        has = f"has {len(batch)} parts" if isinstance(batch, tuple | list) else f"is a {type(batch).__name__}"
        raise UserError(
            f"a batch {has}, but this task needs two: inputs and labels. Let the dataset return two for each "
            "sample, or set data.task to your own task"
        )
    inputs, labels = batch
    if not isinstance(labels, Tensor):
        inner = f" of {type(labels[0]).__name__}" if isinstance(labels, list | tuple) and labels else ""
        raise UserError(f"the labels are a {type(labels).__name__}{inner}, but must be numbers, in a tensor")
    return inputs, labels


def inputs_and_any_labels(batch: Any) -> tuple[Any, Tensor | None]:
    """As `inputs_and_labels`; of a batch of inputs alone, without labels."""
    return (batch, None) if isinstance(batch, Tensor) else inputs_and_labels(batch)


def num_counted(labels: Tensor) -> int:
    """The number of counted labels of a batch on the host; for probabilities (B, classes), its rows."""
    if labels.is_floating_point():
        return len(labels)
    return int(np.count_nonzero(labels.cpu().numpy() != IGNORED))  # 3 us; torch takes 9


def counted(labels: Tensor) -> Tensor:
    """Which integer labels count."""
    return labels.long() != IGNORED  # as bytes, IGNORED is 156


def classes_of(labels: Tensor, logits: Tensor) -> Tensor:
    """`labels` as classes (B, ...) int64; of probabilities or one-hot labels, the largest."""
    return labels.double().argmax(dim=1) if labels.shape == logits.shape else labels.long()


class CrossEntropy:
    """torch's cross entropy, with an error that names invalid labels, which torch does not on a GPU.

    Labels are classes (B, ...) or, in the shape of the logits (B, classes, ...), probabilities or
    one-hot. On a GPU only the labels of the first batch are checked: each check would wait for the GPU.
    """

    def __init__(self, setting: str) -> None:
        self._setting, self._looked = setting, False
        self._function = _cross_entropy

    def compile(self) -> None:
        """Compute loss and gradient in one pass from now on, without keeping logits in fp32."""
        self._function = torch.compile(_cross_entropy)

    def __call__(self, logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        are_shares = labels.shape == logits.shape
        if are_shares and not labels.is_floating_point():
            labels = labels.to(logits.dtype)
        elif not labels.is_floating_point() and labels.dtype not in _TAKEN_BY_TORCH:
            labels = labels.long()
        is_here = labels.is_cpu and type(labels) is Tensor  # and has values, as fake tensors have not
        if (is_accelerator(labels.device) and not self._looked) or (are_shares and is_here):
            self._refuse_others(logits, labels)
        self._looked = True
        try:
            function = _cross_entropy if labels.is_meta else self._function  # not compiled for meta
            return function(logits, labels, **options)
        except (IndexError, RuntimeError):
            self._refuse_others(logits, labels)
            raise

    def _refuse_others(self, logits: Tensor, labels: Tensor) -> None:
        """Raise UserError if the shape of labels is wrong, or one is not a class of the model."""
        num_classes, one_each = logits.shape[1], logits.shape[:1] + logits.shape[2:]
        if labels.shape != (logits.shape if labels.is_floating_point() else one_each):
            raise UserError(
                f"the labels are {labels.dtype} {tuple(labels.shape)}, but with the model's logits "
                f"{tuple(logits.shape)} must be classes, integers {tuple(one_each)}, or class "
                f"probabilities, floats {tuple(logits.shape)}; check the data, or set {self._setting}"
            )
        if labels.is_floating_point():
            if len(labels) and (smallest_share := float(labels.min())) < 0:
                raise UserError(
                    f"the labels are class probabilities, and the smallest is {smallest_share:g}, which must "
                    "be at least 0: a row of them always counts; use classes, of which -100 does not, or "
                    "leave such samples out"
                )
            return
        given = labels[counted(labels)]
        if len(given) and not 0 <= int(given.min()) <= int(given.max()) < num_classes:
            smallest, largest = int(given.min()), int(given.max())
            raise UserError(
                f"the largest label is {largest} and the smallest {smallest}, but the model has classes 0 to "
                f"{num_classes - 1}; set {self._setting}={max(largest + 1, num_classes)}, or check the data; "
                f"a label that is to be ignored is {IGNORED}"
            )


def _cross_entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, labels, **options)


def logits_as_made(output: Any) -> Tensor:
    """The output of a model: logits, or an object or dict with `logits`, as Hugging Face's models return.

    Raises:
        UserError: it returns something else.
    """
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if isinstance(logits, Tensor):
        return logits
    holds = f" of {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
    raise UserError(
        f"the model returns a {type(output).__name__}{holds}, but must return a tensor of logits, or an "
        "object or a dict with the key logits; or set data.task to your own task"
    )


def logits_of(output: Any) -> Tensor:
    """The logits in fp32; unchanged if only a loss is computed from them."""
    return logits_as_made(output).float()
