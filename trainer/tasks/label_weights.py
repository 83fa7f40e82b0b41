"""The weight of each micro-batch in the loss of a step: its fraction of all counted labels."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from trainer.data.device import Mirrored
from trainer.errors import UserError
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
    value = float(weight(batch.batch if isinstance(batch, Mirrored) else batch))
    if not 0 <= value < math.inf:
        raise UserError(f"{type(task).__name__}.weight gives {value}, but must give how many labels count")
    return value


def divisors(weights: Sequence[float], total: float | Tensor) -> list[Divisor]:
    """The divisors of micro-batches with these weights out of `total`."""
    return [total / weight if weight else None for weight in weights]


def divided(loss: Tensor, divisor: Divisor) -> Tensor:
    """The contribution of a mean loss to the loss of the step.

    The mean over no label is NaN. It adds 0, and gradients of 0: ranks communicate in its backward pass, too.
    """
    if divisor is None:
        return loss.nan_to_num(0.0, 0.0, 0.0) * 0
    if isinstance(divisor, int) and divisor == 1:  # saves two operations of a step
        return loss
    return loss / (divisor.to(loss) if isinstance(divisor, Tensor) else divisor)
