"""The forward and backward pass of a micro-batch, for steps, dry runs and memory estimates alike."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.strategies.base import Strategy
from trainer.tasks import Task
from trainer.tasks.label_counts import loss_of

OnLoss = Callable[[Tensor, Mapping[str, Any] | None], Tensor]
"""Called between the two passes with the loss and its parts; returns the scalar to differentiate."""


def forward_backward(
    strategy: Strategy,
    task: Task,
    model: nn.Module,
    batch: Any,
    on_loss: OnLoss,
    label_count: float = 1,
    is_last: bool = True,
) -> None:
    """Accumulate the gradients of one micro-batch in the parameters of `model`, which `strategy` has wrapped.

    Args:
        label_count: the number of labels that count in the micro-batch; if 0, its gradients are 0.
        is_last: whether this is the last micro-batch of the step, which averages gradients over ranks.
    """
    with strategy.gradient_sync(model, enabled=is_last):
        with strategy.autocast(), strategy.explaining("forward"):
            loss, parts = loss_of(task, model, batch, label_count)
        del batch  # the graph keeps what the backward pass needs
        loss = on_loss(loss, parts)
        with strategy.explaining("backward"):
            # The gradient of a NaN or Inf loss is NaN instead of 1, so that all ranks get NaN gradients.
            loss.backward(torch.rsub(loss.detach(), 1, alpha=0))  # 1 - 0 * loss, in one kernel
