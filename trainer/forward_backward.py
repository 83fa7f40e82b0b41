"""The forward and backward pass of one micro-batch, in a step, in the dry run and in every estimate."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.strategies.base import Strategy
from trainer.tasks import Task
from trainer.tasks.label_counts import loss_of

Between = Callable[[Tensor, Mapping[str, Any] | None], Tensor]
"""Called between the two passes with the loss and its parts; returns the scalar to differentiate."""


def forward_backward(
    strategy: Strategy,
    task: Task,
    model: nn.Module,
    batch: Any,
    between: Between,
    label_count: float = 1,
    is_last: bool = True,
) -> None:
    """Add the gradients of one micro-batch to those of the parameters.

    Args:
        model: wrapped by `strategy`.
        batch: on the device.
        label_count: how many labels of the micro-batch count; without any, its gradients are 0.
        is_last: whether the backward pass also averages the gradients over ranks: the step's last one does.

    Raises:
        UserError: an error of torch whose cause `strategy` knows.
    """
    with strategy.gradient_sync(model, enabled=is_last):
        with strategy.autocast(), strategy.explaining("forward"):
            loss, parts = loss_of(task, model, batch, label_count)
        del batch  # what the backward pass needs of it is in the graph
        loss = between(loss, parts)
        with strategy.explaining("backward"):
            # The gradient of the loss is 1, or NaN for a loss of NaN or Inf: then all ranks get NaN.
            loss.backward(torch.rsub(loss.detach(), 1, alpha=0))  # 1 - 0 * loss, in one kernel
