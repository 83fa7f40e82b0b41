"""Cross entropy that names a label which is no class of the model."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.errors import UserError

IGNORED = -100  # torch's word for a label that does not count


def num_counted(labels: Tensor) -> int:
    """How many of a batch's labels, on the host, count; of shares of the classes (B, classes), each row."""
    if labels.is_floating_point():
        return len(labels)
    return int(np.count_nonzero(labels.cpu().numpy() != IGNORED))  # 3 us, where torch takes 9


def counted(labels: Tensor) -> Tensor:
    """Which labels, integers, count."""
    return labels.long() != IGNORED  # as bytes, IGNORED is 156


def classes_of(labels: Tensor, logits: Tensor) -> Tensor:
    """`labels` as classes (B, ...) int64: where they are shares of the classes, or one-hot, the largest."""
    return labels.double().argmax(dim=1) if labels.shape == logits.shape else labels.long()


class CrossEntropy:
    """torch's, which on a CPU names no more than one label that is no class, and on a GPU none.

    Labels are classes (B, ...) or, of the shape of the logits (B, classes, ...), shares of the classes or
    one-hot. A GPU is asked for the labels of the first batch alone: each look would wait for it.
    """

    def __init__(self, setting: str) -> None:
        self._setting, self._looked = setting, False
        self._function = _cross_entropy

    def compile(self) -> None:
        """From now on compute loss and gradient in one pass, which keeps no logits in fp32."""
        self._function = torch.compile(_cross_entropy)

    def __call__(self, logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        if labels.shape == logits.shape and not labels.is_floating_point():
            labels = labels.to(logits.dtype)
        if labels.is_cuda and not self._looked:
            self._refuse_others(logits, labels)
        self._looked = True
        try:
            function = _cross_entropy if labels.is_meta else self._function  # a compiler has none for meta
            return function(logits, labels, **options)
        except (IndexError, RuntimeError):
            self._refuse_others(logits, labels)
            raise

    def _refuse_others(self, logits: Tensor, labels: Tensor) -> None:
        """Raise UserError where labels are not of a shape that fits, or one is no class of the model."""
        num_classes, one_each = logits.shape[1], logits.shape[:1] + logits.shape[2:]
        if labels.shape != (logits.shape if labels.is_floating_point() else one_each):
            raise UserError(
                f"the labels are {labels.dtype} {tuple(labels.shape)}, but for the model's logits "
                f"{tuple(logits.shape)} must be classes, integers {tuple(one_each)}, or the share of each "
                f"class, floats {tuple(logits.shape)}; look at the data, or set {self._setting}"
            )
        if labels.is_floating_point():
            return
        given = labels[counted(labels)]
        if len(given) and not 0 <= int(given.min()) <= int(given.max()) < num_classes:
            smallest, largest = int(given.min()), int(given.max())
            raise UserError(
                f"the largest label is {largest} and the smallest {smallest}, but the model knows 0 to "
                f"{num_classes - 1}; set {self._setting}={max(largest + 1, num_classes)}, or look at the data"
            )


def _cross_entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.float(), labels, **options)


def logits_as_made(output: Any) -> Tensor:
    """What a model returns: its logits, or an object or a dict that has them, as of Hugging Face's models.

    Raises:
        UserError: it returns something else.
    """
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if isinstance(logits, Tensor):
        return logits
    holds = f" of {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
    raise UserError(
        f"the model returns a {type(output).__name__}{holds}, but must return a tensor of logits, or an "
        "object or a dict that has one as logits; or name a task of yours as data.task"
    )


def logits_of(output: Any) -> Tensor:
    """What a model returns, in fp32; as it was made where a loss is all that comes of it."""
    return logits_as_made(output).float()
