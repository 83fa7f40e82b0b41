"""Learning-rate schedules, each a factor on `optim.lr` as a function of the step.

Every schedule warms up linearly over its first `warmup_steps` steps; step 0 already moves the weights.
Optimizers are torch's own, named in conf/optim.
"""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def constant(optimizer: Optimizer, warmup_steps: int = 0) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: _warmup(step, warmup_steps))


def linear(
    optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, final_fraction: float = 0.0
) -> LambdaLR:
    return _decay(optimizer, total_steps, warmup_steps, final_fraction, lambda done: 1 - done)


def cosine(
    optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, final_fraction: float = 0.0
) -> LambdaLR:
    """Half a cosine from 1 to `final_fraction` (Loshchilov & Hutter, SGDR, 2017, without restarts)."""
    return _decay(
        optimizer, total_steps, warmup_steps, final_fraction, lambda done: (1 + math.cos(math.pi * done)) / 2
    )


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / (warmup_steps + 1))


def _decay(
    optimizer: Optimizer,
    total_steps: int,
    warmup_steps: int,
    final_fraction: float,
    shape: Callable[[float], float],
) -> LambdaLR:
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(f"warmup_steps is {warmup_steps}, but must lie below total_steps, {total_steps}")
    if not 0 <= final_fraction <= 1:
        raise ValueError(f"final_fraction is {final_fraction}, but must lie in 0..1")

    def factor(step: int) -> float:
        done = min(1.0, max(0, step - warmup_steps) / (total_steps - warmup_steps))
        return _warmup(step, warmup_steps) * (final_fraction + (1 - final_fraction) * shape(done))

    return LambdaLR(optimizer, factor)
