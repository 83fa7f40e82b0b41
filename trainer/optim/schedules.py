"""Learning-rate schedules, each a factor of `optim.lr` by step; and which of torch's schedules are supported.

Every schedule here warms up linearly over its first `warmup_steps` steps; step 0 already changes the weights.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from trainer.config.instantiate import instantiate
from trainer.errors import UserError

_LOSS = "eval/loss"


class Plateau(ReduceLROnPlateau):
    """Torch's ReduceLROnPlateau, which is told of one metric of each evaluation.

    Args:
        metric: as in the log, eval/loss or eval/accuracy; with mode=max for one that should rise.
        options: of ReduceLROnPlateau.
    """

    def __init__(self, optimizer: Optimizer, metric: str = _LOSS, **options: Any) -> None:
        super().__init__(optimizer, **options)
        self.metric = metric

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "metric"}


def watched_metric(node: dict[str, Any]) -> str | None:
    """The metric that the schedule of `node` follows, if it follows one."""
    if not str(node["_target_"]).endswith(("ReduceLROnPlateau", ".Plateau")):
        return None
    return str(node.get("metric", _LOSS))


def constant(optimizer: Optimizer, warmup_steps: int = 0) -> LambdaLR:
    """A factor of 1 after the warm-up."""
    return LambdaLR(optimizer, lambda step: _warmup(step, warmup_steps))


def linear(
    optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, final_fraction: float = 0.0
) -> LambdaLR:
    """After the warm-up a straight line from 1 to `final_fraction`."""
    return _decay(optimizer, total_steps, warmup_steps, final_fraction, lambda done: 1 - done)


def cosine(
    optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, final_fraction: float = 0.0
) -> LambdaLR:
    """Half a cosine from 1 to `final_fraction` (Loshchilov & Hutter, SGDR, 2017, without restarts)."""
    return _decay(
        optimizer, total_steps, warmup_steps, final_fraction, lambda done: (1 + math.cos(math.pi * done)) / 2
    )


def wsd(
    optimizer: Optimizer,
    total_steps: int,
    warmup_steps: int = 0,
    decay_fraction: float = 0.2,
    final_fraction: float = 0.0,
) -> LambdaLR:
    """Warm-up, stable, decay: 1 up to the last `decay_fraction` of the run, then straight down.

    The part before the decay does not depend on `total_steps`: a run that is extended continues as if it
    had had that length from the start (S. Hu et al., "MiniCPM", 2024, section 4).
    """
    if not 0 < decay_fraction <= 1:
        raise ValueError(f"decay_fraction is {decay_fraction}, but must be above 0 and at most 1")
    return _decay(
        optimizer,
        total_steps,
        warmup_steps,
        final_fraction,
        lambda done: min(1.0, (1 - done) / decay_fraction),
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
    if warmup_steps >= total_steps:
        raise UserError(
            f"schedule.warmup_steps is {warmup_steps}, but this run ends after {total_steps} steps; set "
            f"schedule.warmup_steps={total_steps // 10} or another number below {total_steps}, or train "
            "longer (train.epochs, train.max_steps)"
        )
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps is {warmup_steps}, but must be at least 0")
    if not 0 <= final_fraction <= 1:
        raise ValueError(f"final_fraction is {final_fraction}, but must be from 0 to 1")

    def factor(step: int) -> float:
        done = min(1.0, max(0, step - warmup_steps) / (total_steps - warmup_steps))
        return _warmup(step, warmup_steps) * (final_fraction + (1 - final_fraction) * shape(done))

    return LambdaLR(optimizer, factor)


@dataclass(frozen=True)
class ScheduleFacts:
    """The values for `auto` in a schedule's settings, by the names that schedules use."""

    total_steps: int
    steps_per_epoch: int | None  # None: a stream of unknown length

    def in_steps(self, node: Any) -> Any:
        """`node` with steps in place of texts such as "30 epochs", also in lists and nested schedules."""
        if isinstance(node, dict):
            return {key: self.in_steps(value) for key, value in node.items()}
        if isinstance(node, list):
            return [self.in_steps(value) for value in node]
        found = re.fullmatch(r"(\d+(?:\.\d+)?) epochs?", node) if isinstance(node, str) else None
        if found is None:
            return node
        if self.steps_per_epoch is None:
            raise UserError(f"schedule: {node} of a stream has an unknown number of steps; set steps")
        return round(float(found[1]) * self.steps_per_epoch)

    @property
    def T_max(self) -> int:  # noqa: N802, CosineAnnealingLR's
        return self.total_steps

    @property
    def total_iters(self) -> int:  # LinearLR's, PolynomialLR's
        return self.total_steps

    @property
    def num_training_steps(self) -> int:  # of transformers' schedules
        return self.total_steps


def build_schedule(node: dict[str, Any], optimizer: Optimizer, facts: ScheduleFacts) -> LRScheduler:
    """The schedule of `node`, with its nested ones (SequentialLR, ChainedScheduler).

    A schedule or nested one with `_partial_: true`, as Hydra's users write it, is built all the same.
    """
    node = {key: value for key, value in node.items() if key != "_partial_"}
    if not isinstance(nodes := node.get("schedulers"), list):
        schedule: LRScheduler = instantiate("schedule", node, optimizer, facts=facts)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"] + 0)  # of which ReduceLROnPlateau keeps none
        return schedule
    parts = [build_schedule(part, optimizer, facts) for part in nodes]
    if any(isinstance(part, ReduceLROnPlateau) for part in parts):
        raise UserError(
            "schedule.schedulers: ReduceLROnPlateau counts evaluations, and cannot be part of another"
        )
    rest = {key: value for key, value in node.items() if key != "schedulers"}
    return instantiate("schedule", rest, facts=facts, optimizer=optimizer, schedulers=parts)


def settings_of(node: dict[str, Any], facts: ScheduleFacts) -> dict[str, Any]:
    """`node` with the values that its `auto` stand for."""
    if isinstance(nodes := node.get("schedulers"), list):
        node = node | {"schedulers": [settings_of(part, facts) for part in nodes]}
    return {key: getattr(facts, key) if value == "auto" else value for key, value in node.items()}


def after_step(schedule: LRScheduler) -> None:
    """Advance `schedule` by an optimizer step; ReduceLROnPlateau counts evaluations instead.

    Raises:
        UserError: it has no further step, such as torch's OneCycleLR after its total_steps.
    """
    if isinstance(schedule, ReduceLROnPlateau):
        return
    try:
        schedule.step()
    except ValueError as error:
        raise UserError(f"schedule: {type(schedule).__name__} has no further step: {error}") from error


def after_evaluation(schedule: LRScheduler, metrics: Mapping[str, float]) -> None:
    """Pass the metrics of an evaluation to ReduceLROnPlateau; `metrics` are the same on every rank."""
    if isinstance(schedule, ReduceLROnPlateau):
        schedule.step(metrics[getattr(schedule, "metric", _LOSS)])


def check_schedule(schedule: LRScheduler, evaluates: bool) -> None:
    """Raise UserError for a schedule that this run does not support."""
    if not isinstance(schedule, LRScheduler):
        raise UserError(f"schedule is a {type(schedule).__name__}; it must be a torch.optim.lr_scheduler")
    if not isinstance(schedule, ReduceLROnPlateau):
        return
    if not evaluates:
        raise UserError(
            "schedule: ReduceLROnPlateau lowers the learning rate when a metric of evaluation no longer "
            "improves, but train.eval_every_epochs=0 never evaluates; set it to 1"
        )
    if schedule.mode != "min" and (metric := getattr(schedule, "metric", _LOSS)).endswith("/loss"):
        raise UserError(f"schedule.mode is {schedule.mode}, but {metric} should fall; set it to min")
