"""The settings of an existing run, read from its config.yaml by commands such as `trainer.evaluate`.

Settings of the launch, the ranks and the all-reduce come from the current command, not from the file. This
module never imports torch, so that user errors are reported before torch is loaded.
"""

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from trainer.config import Config, load
from trainer.config.overrides import CONF, explain, leaves, not_a_setting
from trainer.errors import UserError, on_one_line

MAY_CHANGE = ("strategy", "data", "train", "distributed", "launch", "checkpoint", "model", "ema")
MAY_CHANGE_STEPS = (*MAY_CHANGE, "optim", "schedule", "comm")  # in commands that repeat steps
_COMMAND_GROUPS = {"launch": "external", "comm": "native"}  # not taken from the run


class Folder(Protocol):
    """A local path or a remote address."""

    def __truediv__(self, name: str, /) -> Any: ...


def saved_settings(run_dir: Folder, overrides: Sequence[str] = (), trains: bool = False) -> Config:
    """Return the settings of the run in `run_dir`, with `overrides` applied as on a command line.

    If `trains`, `overrides` may also contain settings of the optimizer, and the run's all-reduce is kept,
    unless it uses train.exact or `overrides` set the strategy.
    """
    saved = read_settings(run_dir)
    changes = [_parse(override, MAY_CHANGE_STEPS if trains else MAY_CHANGE) for override in overrides]
    groups = dict(_COMMAND_GROUPS)
    keeps_comm = (
        trains and saved.train.get("exact") is None and all(c.key_or_group != "strategy" for c in changes)
    )
    if keeps_comm:
        del groups["comm"]
    groups |= {change.key_or_group: str(change.value()) for change in changes if _names_group(change)}
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = compose("train", overrides=[f"{group}={name}" for group, name in groups.items()])
        settings = _merged(composed, saved, groups)
        settings.run_dir, settings.resume = str(run_dir), None
        if not keeps_comm:
            settings.comm.timeline = False
        settings.checkpoint.format = "sharded"  # valid for any strategy; nothing is saved
        for change in changes:
            if not _names_group(change):
                _apply(settings, change)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error)) from error
    config = load(settings)
    if config.seed is None:
        raise UserError(f"{run_dir / 'config.yaml'}: seed is null, but a run always writes its seed there")
    return config


def read_settings(run_dir: Folder) -> DictConfig:
    """Return the saved settings. Raises UserError if config.yaml does not exist or cannot be read."""
    path = run_dir / "config.yaml"
    try:
        with path.open("rb") as file:
            saved = OmegaConf.load(io.TextIOWrapper(file))
    except (FileNotFoundError, NotADirectoryError) as error:
        hint = ""
        if (run_dir / "manifest.json").exists():
            hint = f"; it is a checkpoint: pass its run, and --checkpoint {run_dir}"
        elif (run_dir / "trials.jsonl").exists():
            hint = "; it is a sweep: pass one of the runs in it"
        raise UserError(f"{run_dir} is not a run: it has no config.yaml{hint}") from error
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path} cannot be read: {on_one_line(error)}") from error
    if not isinstance(saved, DictConfig) or not {"model", "data", "strategy"} <= saved.keys():
        raise UserError(f"{path} does not contain the settings of a run")
    return saved


def saved_values(run_dir: Folder) -> dict[str, str]:
    """Return the saved settings as text by dotted name, without run_dir and resume.

    Raises UserError like `read_settings`.
    """
    values = leaves(OmegaConf.to_container(read_settings(run_dir)))
    return {name: _as_typed(value) for name, value in values if name not in ("run_dir", "resume")}


def _as_typed(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def differing_settings(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of settings that differ between runs, starting with those that all runs have."""
    names = dict.fromkeys(name for each in settings for name in each)
    differing = [name for name in names if len({each.get(name) for each in settings}) > 1]
    return sorted(differing, key=lambda name: not all(name in each for each in settings))


def _merged(composed: DictConfig, saved: DictConfig, groups: dict[str, str]) -> DictConfig:
    """Return `saved`, with `groups`, and settings that the run does not have, taken from `composed`."""
    own = OmegaConf.load(CONF / "train.yaml")  # settings outside groups
    assert isinstance(own, DictConfig)
    with open_dict(own):
        del own["defaults"], own["hydra"]
    chosen = {name: composed[name] for name in composed if name in groups or name not in {*own, *saved}}
    settings = OmegaConf.merge(own, {name: saved[name] for name in saved if name not in groups}, chosen)
    assert isinstance(settings, DictConfig)
    for name in ("rank", "world_size", "init_method", "shrink"):
        settings.distributed[name] = own.distributed[name]
    OmegaConf.set_struct(settings, True)
    return settings


def _parse(override: str, may_change: Sequence[str]) -> Override:
    try:
        change = OverridesParser.create().parse_override(override)
    except HydraException as error:
        raise UserError(f"{override} is not an override such as strategy=fsdp: {explain(error)}") from error
    if change.is_sweep_override() or change.is_delete():
        raise UserError(f"{override}: expected a single value, such as strategy=fsdp")
    key = change.key_or_group
    if key.partition(".")[0] not in may_change:
        why = "can't be changed in a replay" if "optim" in may_change else "has no effect after training"
        raise UserError(f"{override} {why}; use one of {', '.join(may_change)}")
    return change


def _names_group(change: Override) -> bool:
    return (CONF / change.key_or_group).is_dir() and isinstance(change.value(), str)


def _apply(settings: DictConfig, change: Override) -> None:
    key = change.key_or_group
    if not change.is_add() and OmegaConf.select(settings, key, throw_on_missing=False, default=...) is ...:
        raise UserError(not_a_setting(key, settings))
    value = change.value()
    # A new class replaces all arguments of the previous one.
    replaces = isinstance(value, dict) and "_target_" in value
    OmegaConf.update(settings, key, value, merge=not replaces, force_add=replaces or change.is_add())
