"""Options of the optimizer and the schedule after a resume: saved values, unless their settings changed."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainer.optim.schedules import after_step
from trainer.torch_private import set_last_lr

# The options of a parameter group that schedules set.
SCHEDULED_OPTIONS = frozenset(
    ("lr", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "momentum", "betas")
)


def initial_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each group, before the first step and before a resume changes them."""
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
) -> list[dict[str, Any]]:
    """Advance the new `schedule` to `step`, and return the options of each parameter group.

    An option whose setting has not changed gets its saved value, which a schedule or the optimizer may have
    modified, so a resume without new settings is exact. A schedule whose settings have not changed gets its
    saved state. Otherwise it is stepped from the start, which takes microseconds per step, because its
    settings and the step determine its state. ReduceLROnPlateau depends on evaluations instead, so the factor
    by which it reduced the saved rates is applied to the rates of this run.

    Args:
        saved: the state in the checkpoint.
        now: the settings of this run, in the form of `saved["settings"]`.
        earlier: for each group, the index of the group in the checkpoint that it continues.
    """
    groups = schedule.optimizer.param_groups
    saved_settings: list[dict[str, Any]] = [saved["settings"]["groups"][index] for index in earlier]
    saved_groups: list[dict[str, Any]] = [saved["optimizer"]["param_groups"][index] for index in earlier]
    same_schedule = saved["settings"]["schedule"] == now["schedule"]
    changed = [
        {key for key, value in settings.items() if key not in before or before[key] != value}
        for settings, before in zip(now["groups"], saved_settings, strict=True)
    ]
    same_rates = len(groups) == len(saved_settings) == len(saved["settings"]["groups"]) and not any(
        keys & SCHEDULED_OPTIONS for keys in changed
    )
    if same_schedule and same_rates:
        schedule.load_state_dict(dict(saved["schedule"]))
    elif not isinstance(schedule, ReduceLROnPlateau):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about steps before an update
            for _ in range(step):
                after_step(schedule)
    elif "num_bad_epochs" in saved["schedule"]:  # otherwise, the saved run had another schedule
        kept = ("last_epoch", "best", "num_bad_epochs", "cooldown_counter")
        schedule.load_state_dict({key: saved["schedule"][key] for key in kept})
        for group, before in zip(groups, saved_groups, strict=True):
            factor = float(before["lr"] / before["initial_lr"]) if before["initial_lr"] else 1.0
            set_rate(group, group["initial_lr"] * factor)
        set_last_lr(schedule, [group["lr"] + 0 for group in groups])
    scheduled = set() if same_schedule else SCHEDULED_OPTIONS
    new_options = [
        {key: value for key, value in group.items() if key in keys | scheduled and key != "params"}
        for group, keys in zip(groups, changed, strict=True)
    ]
    kept_options = [
        {key: value for key, value in before.items() if key in group or key not in settings}
        for before, group, settings in zip(saved_groups, groups, saved_settings, strict=True)
    ]
    return [kept | new for kept, new in zip(kept_options, new_options, strict=True)]


def set_rate(group: dict[str, Any], rate: Any) -> None:
    """Set the learning rate of a group, in place if it is a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
