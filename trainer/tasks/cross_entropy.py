"""Cross entropy, with an error message that names labels outside the model's classes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.accelerator import double, is_accelerator
from trainer.errors import UserError

_TORCH_LABEL_DTYPES = (torch.int64, torch.uint8)
IGNORED = -100  # torch's value for a label that does not count


def inputs_and_labels(batch: Any) -> tuple[Any, Tensor]:
    """Return the inputs and the labels of a batch, or raise UserError for any other batch."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        has = f"has {len(batch)} parts" if isinstance(batch, tuple | list) else f"is a {type(batch).__name__}"
        raise UserError(
            f"a batch {has}, but this task expects two: inputs and labels. Return both for each sample of "
            "the dataset, or set data.task to your own task"
        )
    inputs, labels = batch
    if not isinstance(labels, Tensor):
        inner = f" of {type(labels[0]).__name__}" if isinstance(labels, list | tuple) and labels else ""
        raise UserError(f"expected labels as a tensor of numbers, got a {type(labels).__name__}{inner}")
    return inputs, labels


def inputs_and_any_labels(batch: Any) -> tuple[Any, Tensor | None]:
    """Return the inputs and the labels of a batch; the labels are None if the batch contains only inputs."""
    return (batch, None) if isinstance(batch, Tensor) else inputs_and_labels(batch)


def num_counted(labels: Tensor) -> int:
    """Return the number of labels (on the CPU) that count in the loss; for probabilities (B, classes), B."""
    if labels.is_floating_point():
        return len(labels)
    return int(np.count_nonzero(labels.cpu().numpy() != IGNORED))  # 3 us; torch takes 9


def counted(labels: Tensor) -> Tensor:
    """Return a mask that is true where an integer label contributes to the loss."""
    return labels.long() != IGNORED  # as bytes, IGNORED is 156


def classes_of(labels: Tensor, logits: Tensor) -> Tensor:
    """Return `labels` as classes (B, ...), int64; for probabilities or one-hot labels, the likeliest."""
    return double(labels).argmax(dim=1).to(labels.device) if labels.shape == logits.shape else labels.long()


class CrossEntropy:
    """torch's cross entropy, with an error message that names invalid labels and the `setting` to change.

    Labels are classes (B, ...) or, in the shape of the logits (B, classes, ...), probabilities or one-hot. On
    a GPU only the labels of the first batch are checked, because each check waits for the GPU.
    """

    def __init__(self, setting: str) -> None:
        self._setting, self._has_checked = setting, False
        self._function = _cross_entropy

    def compile(self) -> None:
        """Compile the loss, so that no copy of the logits in fp32 is kept for the backward pass."""
        self._function = torch.compile(_cross_entropy)

    def __call__(self, logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        are_probabilities = labels.shape == logits.shape
        if are_probabilities and not labels.is_floating_point():
            labels = labels.to(logits.dtype)
        elif not labels.is_floating_point() and labels.dtype not in _TORCH_LABEL_DTYPES:
            labels = labels.long()
        is_on_cpu = labels.is_cpu and type(labels) is Tensor  # a fake tensor has no values
        if (is_accelerator(labels.device) and not self._has_checked) or (are_probabilities and is_on_cpu):
            self._refuse_invalid(logits, labels)
        self._has_checked = True
        try:
            function = _cross_entropy if labels.is_meta else self._function  # meta: nothing to compile
            return function(logits, labels, **options)
        except (IndexError, RuntimeError):
            self._refuse_invalid(logits, labels)
            raise

    def _refuse_invalid(self, logits: Tensor, labels: Tensor) -> None:
        num_classes, class_shape = logits.shape[1], logits.shape[:1] + logits.shape[2:]
        if labels.shape != (logits.shape if labels.is_floating_point() else class_shape):
            raise UserError(
                f"the labels are {labels.dtype} of shape {tuple(labels.shape)}, but with logits of shape "
                f"{tuple(logits.shape)} they must be class indices (integers of shape {tuple(class_shape)}) "
                f"or class probabilities (floats of shape {tuple(logits.shape)}); check the data, or set "
                f"{self._setting}"
            )
        if labels.is_floating_point():
            if len(labels) and (smallest := float(labels.min())) < 0:
                raise UserError(
                    "the labels are class probabilities, which must be at least 0, but the smallest is "
                    f"{smallest:g}; use class indices as labels if some must be ignored ({IGNORED}), or "
                    "remove the samples with negative values from the dataset"
                )
            return
        given = labels[counted(labels)]
        if len(given) and not 0 <= int(given.min()) <= int(given.max()) < num_classes:
            least, most = int(given.min()), int(given.max())
            raise UserError(
                f"the labels range from {least} to {most}, but the model has classes 0 to {num_classes - 1}; "
                f"set {self._setting}={max(most + 1, num_classes)}, or check the data; use {IGNORED} for "
                "labels to ignore"
            )


def _cross_entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, labels, **options)


def raw_logits(output: Any) -> Tensor:
    """Return the logits of a model's output: a tensor, or an object or dict with `logits` (Hugging Face)."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if isinstance(logits, Tensor):
        return logits
    keys = f" of {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
    raise UserError(
        f"the model returns a {type(output).__name__}{keys}, but must return a tensor of logits, or an "
        "object or dict with logits; change the model, or set data.task to your own task"
    )


def logits_of(output: Any) -> Tensor:
    """Return the logits of a model's output in fp32."""
    return raw_logits(output).float()
