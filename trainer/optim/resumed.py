"""Optimizer and schedule at a resume: what was saved, or what follows from a setting that has changed."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainer.errors import UserError
from trainer.optim.schedules import after_step
from trainer.torch_private import set_last_lr

_MOVED = ("momentum", "betas")  # by some schedules, beside the rate
OF_SCHEDULES = frozenset(
    ("lr", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", *_MOVED)
)  # the options of a group that schedules set


def initial_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each group, as the settings give them: before the first step, and before a resume."""
    return [
        {key: _plain(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def continue_groups(
    schedule: LRScheduler,
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    step: int,
    earlier: Sequence[int],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Bring `schedule` to `step`; return each group's options, and those among them that a setting changed.

    An option whose setting is the same keeps its saved value, even if a schedule or the optimizer changed
    it: a resume without new settings is exact. A schedule with the same settings has its saved state. Another
    one is stepped to where it is, in microseconds a step, since it follows from its settings and the step;
    ReduceLROnPlateau follows from evaluations, so its reduction of the saved rates is applied to this run's.

    Args:
        schedule: new, of an optimizer with this run's settings.
        saved: the state of the checkpoint.
        now: this run's `settings` of a state, of which `saved` has the checkpoint's.
        earlier: for each group, which group of the checkpoint it continues.
    """
    groups = schedule.optimizer.param_groups
    then: list[dict[str, Any]] = [saved["settings"]["groups"][index] for index in earlier]
    were: list[dict[str, Any]] = [saved["optimizer"]["param_groups"][index] for index in earlier]
    same_schedule = saved["settings"]["schedule"] == now["schedule"]
    changed = [
        {key for key, value in mine.items() if key not in theirs or theirs[key] != value}
        for mine, theirs in zip(now["groups"], then, strict=True)
    ]
    same_rates = len(groups) == len(then) == len(saved["settings"]["groups"]) and not any(
        keys & OF_SCHEDULES for keys in changed
    )
    if same_schedule and same_rates:
        schedule.load_state_dict(dict(saved["schedule"]))
    elif not isinstance(schedule, ReduceLROnPlateau):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, which saw no update before these steps
            for _ in range(step):
                after_step(schedule)
    elif "num_bad_epochs" in saved["schedule"]:  # else it begins here, after another
        kept = ("last_epoch", "best", "num_bad_epochs", "cooldown_counter")
        schedule.load_state_dict({key: saved["schedule"][key] for key in kept})
        for group, was in zip(groups, were, strict=True):
            share = float(was["lr"] / was["initial_lr"]) if was["initial_lr"] else 1.0
            set_rate(group, group["initial_lr"] * share)
        set_last_lr(schedule, [group["lr"] + 0 for group in groups])
    scheduled = set() if same_schedule else OF_SCHEDULES
    own = [
        {key: value for key, value in group.items() if key in keys | scheduled and key != "params"}
        for group, keys in zip(groups, changed, strict=True)
    ]
    still = [
        {key: value for key, value in was.items() if key in group or key not in theirs}
        for was, group, theirs in zip(were, groups, then, strict=True)
    ]
    return [was | new for was, new in zip(still, own, strict=True)], own


def check_continued(
    part: Optimizer, group: Mapping[str, Any], own: Mapping[str, Any], schedule: LRScheduler
) -> None:
    """Raise UserError unless `group` holds `own`, what this run's settings changed at the resume."""
    if other := [key for key, value in own.items() if _plain(group.get(key)) != _plain(value)]:
        raise UserError(
            f"{other[0]} should be {_plain(own[other[0]])} after this resume, by this run's settings, but is "
            f"{_plain(group.get(other[0]))}: let load_state_dict of {type(part).__name__} and "
            f"{type(schedule).__name__} restore their state only, or set optim and schedule as they were"
        )


def set_rate(group: dict[str, Any], rate: Any) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
