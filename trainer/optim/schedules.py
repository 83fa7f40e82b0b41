"""Learning-rate schedules, and the construction of torch's schedules.

Each schedule here multiplies `optim.lr` by a factor that depends on the step. The factor increases linearly
over the first `warmup_steps` steps, from 1 / (warmup_steps + 1) at step 0.
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
    """torch's ReduceLROnPlateau, applied to a metric of the evaluations.

    Args:
        metric: the name of the metric in the log, such as eval/loss or eval/accuracy. Set mode=max for
            metrics that should increase.
        options: further arguments of ReduceLROnPlateau.
    """

    def __init__(self, optimizer: Optimizer, metric: str = _LOSS, **options: Any) -> None:
        super().__init__(optimizer, **options)
        self.metric = metric

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "metric"}


def watched_metric(node: dict[str, Any]) -> str | None:
    """Return the metric on which the schedule in `node` depends, or None."""
    if not str(node["_target_"]).endswith(("ReduceLROnPlateau", ".Plateau")):
        return None
    return str(node.get("metric", _LOSS))


def constant(optimizer: Optimizer, warmup_steps: int = 0) -> LambdaLR:
    """Return a schedule with a factor of 1 after the warm-up."""
    return LambdaLR(optimizer, lambda step: _warmup(step, warmup_steps))


def linear(
    optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, final_fraction: float = 0.0
) -> LambdaLR:
    """Return a schedule that decreases linearly from 1 to `final_fraction` after the warm-up."""
    return _decay(optimizer, total_steps, warmup_steps, final_fraction, lambda done: 1 - done)


def cosine(
    optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, final_fraction: float = 0.0
) -> LambdaLR:
    """Return a schedule that decreases from 1 to `final_fraction` along half a cosine, after the warm-up.

    Source: I. Loshchilov and F. Hutter, "SGDR", 2017 (without restarts).
    """
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
    """Return a warmup-stable-decay schedule, whose factor is constant and then decays linearly.

    Args:
        decay_fraction: the length of the decay, as a fraction of the steps after the warm-up.

    The part before the decay does not depend on `total_steps`, so a run can be extended before its decay.

    Source: S. Hu et al., "MiniCPM", 2024, section 4.
    """
    if not 0 < decay_fraction <= 1:
        raise ValueError(f"decay_fraction={decay_fraction}: expected a number above 0 and at most 1")
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
            f"schedule.warmup_steps={warmup_steps}, but this run ends after {total_steps} steps; set "
            f"schedule.warmup_steps={total_steps // 10} or another number below {total_steps}, or train "
            "longer (train.epochs, train.max_steps)"
        )
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps}: expected at least 0")
    if not 0 <= final_fraction <= 1:
        raise ValueError(f"final_fraction={final_fraction}: expected a number from 0 to 1")

    def factor(step: int) -> float:
        done = min(1.0, max(0, step - warmup_steps) / (total_steps - warmup_steps))
        return _warmup(step, warmup_steps) * (final_fraction + (1 - final_fraction) * shape(done))

    return LambdaLR(optimizer, factor)


@dataclass(frozen=True)
class ScheduleFacts:
    """The values that replace `auto` in a schedule's settings, named like the schedules' arguments."""

    total_steps: int
    steps_per_epoch: int | None  # None: a stream of unknown length

    def in_steps(self, node: Any) -> Any:
        """Return `node` with text such as "30 epochs", at any depth, replaced with numbers of steps."""
        if isinstance(node, dict):
            return {key: self.in_steps(value) for key, value in node.items()}
        if isinstance(node, list):
            return [self.in_steps(value) for value in node]
        match = re.fullmatch(r"(\d+(?:\.\d+)?) epochs?", node) if isinstance(node, str) else None
        if match is None:
            return node
        if self.steps_per_epoch is None:
            raise UserError(
                f"schedule: {node} cannot be converted to steps, because the length of the stream is "
                "unknown; set a number of steps"
            )
        return round(float(match[1]) * self.steps_per_epoch)

    @property
    def T_max(self) -> int:  # noqa: N802, argument of CosineAnnealingLR
        return self.total_steps

    @property
    def total_iters(self) -> int:  # argument of LinearLR and PolynomialLR
        return self.total_steps

    @property
    def num_training_steps(self) -> int:  # argument of transformers' schedules
        return self.total_steps


def build_schedule(node: dict[str, Any], optimizer: Optimizer, facts: ScheduleFacts) -> LRScheduler:
    """Build the schedule of `node`, and its nested schedules (SequentialLR, ChainedScheduler).

    `_partial_: true`, which is common in Hydra configs, is ignored.
    """
    node = {key: value for key, value in node.items() if key != "_partial_"}
    if not isinstance(nodes := node.get("schedulers"), list):
        schedule: LRScheduler = instantiate("schedule", node, optimizer, facts=facts)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"] + 0)  # ReduceLROnPlateau does not set it
        return schedule
    parts = [build_schedule(part, optimizer, facts) for part in nodes]
    if any(isinstance(part, ReduceLROnPlateau) for part in parts):
        raise UserError(
            "schedule.schedulers: ReduceLROnPlateau is not supported as part of another schedule, because it "
            "depends on evaluations; use it as the only schedule"
        )
    rest = {key: value for key, value in node.items() if key != "schedulers"}
    return instantiate("schedule", rest, facts=facts, optimizer=optimizer, schedulers=parts)


def settings_of(node: dict[str, Any], facts: ScheduleFacts) -> dict[str, Any]:
    """Return `node` with values in place of `auto`."""
    if isinstance(nodes := node.get("schedulers"), list):
        node = node | {"schedulers": [settings_of(part, facts) for part in nodes]}
    return {key: getattr(facts, key) if value == "auto" else value for key, value in node.items()}


def after_step(schedule: LRScheduler) -> None:
    """Advance `schedule` by one optimizer step, unless it depends on evaluations (ReduceLROnPlateau)."""
    if isinstance(schedule, ReduceLROnPlateau):
        return
    try:
        schedule.step()
    except ValueError as error:
        raise UserError(
            f"schedule: {type(schedule).__name__} ended before the last step of the run: {error}"
        ) from error


def after_evaluation(schedule: LRScheduler, metrics: Mapping[str, float]) -> None:
    """Advance ReduceLROnPlateau with the metrics of an evaluation, which are equal on all ranks."""
    if isinstance(schedule, ReduceLROnPlateau):
        schedule.step(metrics[getattr(schedule, "metric", _LOSS)])


def check_schedule(schedule: LRScheduler, evaluates: bool) -> None:
    """Raise UserError for a schedule that this run does not support."""
    if not isinstance(schedule, LRScheduler):
        raise UserError(f"schedule: expected a torch LRScheduler, got a {type(schedule).__name__}")
    if not isinstance(schedule, ReduceLROnPlateau):
        return
    if not evaluates:
        raise UserError(
            "schedule: ReduceLROnPlateau needs evaluations, but train.eval_every_epochs=0; set "
            "train.eval_every_epochs=1"
        )
    if schedule.mode != "min" and (metric := getattr(schedule, "metric", _LOSS)).endswith("/loss"):
        raise UserError(f"schedule.mode={schedule.mode}, but {metric} should decrease; set schedule.mode=min")
