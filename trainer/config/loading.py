"""Convert the composed Hydra config to a `Config`, and a `Config` to dotted names or YAML."""

import copy
import dataclasses
import math
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from trainer.config.contradictions import check_contradictions
from trainer.config.limits import check_limits
from trainer.config.nodes import check_nodes
from trainer.config.overrides import RENAMED, leaves, mapping_settings, no_value, not_a_setting, wrong_type
from trainer.config.schema import COMMS, GROUPS, LAUNCHES, STRATEGIES, Config, TrainConfig
from trainer.errors import UserError, first_line

_KINDS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("strategy", "name", STRATEGIES),
    ("comm", "algorithm", COMMS),
    ("launch", "name", LAUNCHES),
)


def load(composed: DictConfig) -> Config:
    """Return the typed, resolved and validated settings.

    Raises:
        UserError: an unknown key (also one added with `+`), a wrong type, a value outside its limits, a
            missing value, or two settings that contradict each other.
    """
    try:
        for name in GROUPS:
            if not OmegaConf.is_dict(composed[name]):
                raise UserError(
                    f"{name} is {composed[name]}, but must be a mapping; set its entries with "
                    f"{name}.NAME=VALUE"
                )
        for old in RENAMED:  # an unknown setting of `optim` would be passed to the optimizer's class
            if OmegaConf.select(composed, old, default=...) is not ...:
                raise UserError(not_a_setting(old))
        schema = OmegaConf.structured(Config)
        for group, key, known in _KINDS:
            if (name := composed[group][key]) not in known:
                raise UserError(f"{group}.{key} is {name}, but must be one of {', '.join(known)}")
            schema[group] = OmegaConf.structured(known[name])
        given = copy.deepcopy(composed)
        with open_dict(given.checkpoint):
            if "async" in given.checkpoint:
                given.checkpoint.async_ = given.checkpoint.pop("async")
        for setting in dataclasses.fields(TrainConfig):
            if "null" in setting.metadata and given.train.get(setting.name, 0) is None:
                given.train[setting.name] = setting.metadata["null"]
        mappings = (*mapping_settings(Config), *mapping_settings(LAUNCHES[composed.launch.name], "launch."))
        for name, _ in mappings:  # OmegaConf's error for a list does not say which setting it is
            if OmegaConf.is_list(OmegaConf.select(given, name)):
                raise UserError(wrong_type(name, "a list, but must be {NAME: VALUE, ...}"))
        merged = OmegaConf.merge(schema, given)
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise UserError(no_value(missing[0]))
        config = OmegaConf.to_object(merged)
    except ConfigKeyError as error:
        raise UserError(not_a_setting(error.full_key or str(error.key), composed)) from error
    except OmegaConfBaseException as error:
        raise UserError(wrong_type(str(error.full_key).rstrip("_"), first_line(error))) from error
    assert isinstance(config, Config)
    for name, value in flatten(config).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name} is {value}, but must be a finite number")
    check_limits(config)
    check_nodes(config)
    check_contradictions(config)
    return config


def flatten(config: Config) -> dict[str, Any]:
    """Return the value of every setting by its dotted name, as written on the command line."""
    return dict(leaves(_as_dict(config)))


def to_yaml(config: Config) -> str:
    """Return the resolved settings as YAML, which can be used with `--config-dir`."""
    return OmegaConf.to_yaml(OmegaConf.create(_as_dict(config)))


def _as_dict(config: Config) -> dict[str, Any]:
    settings = dataclasses.asdict(config)
    settings["checkpoint"]["async"] = settings["checkpoint"].pop("async_")
    return settings
