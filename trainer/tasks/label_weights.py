"""How much each micro-batch adds to the loss of a step: its share of all labels that count."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from trainer.data.device import Mirrored
from trainer.errors import UserError
from trainer.tasks import Task

Divisor = float | Tensor | None
"""By what the mean loss of a micro-batch is divided before losses are added up; None: it adds nothing."""


def weight_of(task: Task, batch: Any) -> float:
    """How many labels of a micro-batch on the host count; 1 of each where the task does not say.

    Raises:
        UserError: the task gives a number that is negative or not finite.
    """
    if (weight := getattr(task, "weight", None)) is None:
        return 1.0
    value = float(weight(batch.batch if isinstance(batch, Mirrored) else batch))
    if not 0 <= value < math.inf:
        raise UserError(f"{type(task).__name__}.weight gives {value}, but must give how many labels count")
    return value


def divisors(weights: Sequence[float], total: float | Tensor) -> list[Divisor]:
    """Of micro-batches that weigh so much of `total`."""
    return [total / weight if weight else None for weight in weights]


def divided(loss: Tensor, divisor: Divisor) -> Tensor:
    """What a mean loss adds to that of the step.

    The mean over no label is NaN. It adds 0, and gradients of 0: ranks meet in its backward pass, too.
    """
    if divisor is None:
        return loss.nan_to_num(0.0, 0.0, 0.0) * 0
    return loss / (divisor.to(loss) if isinstance(divisor, Tensor) else divisor)
