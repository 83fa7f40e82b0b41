"""Check the trainer's own keys in `_target_` nodes, whose other keys are arguments of the class."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from trainer.config.limits import PATTERN, check_limits, limited, matching
from trainer.config.schema import Config, HookCommConfig
from trainer.errors import UserError, first_line


@dataclass
class ParameterGroup:
    """An entry of optim.groups: a set of parameters, and options, which default to those of `optim`.

    Attributes:
        match: a regular expression of parameter names.
        dims: select only parameters with this number of dimensions.
        optimizer: the `_target_` node of a separate optimizer for these parameters.
    """

    match: str = field(default="", metadata={"limit": PATTERN})
    name: str | None = matching(
        r"[\w.-]+", "letters, digits and _.-, because it is part of a metric's name", default=None
    )
    dims: int | None = limited(lambda value: value >= 0, "at least 0", None)
    weight_decay: float | None = limited(lambda value: 0 <= value < math.inf, "at least 0", None)
    lr_scale: float | None = limited(lambda value: 0 <= value < math.inf, "at least 0", None)
    optimizer: dict[str, Any] | None = None


@dataclass
class NoDecay:
    """optim.no_decay: which parameters have no weight decay, unless their group sets it."""

    below_dims: int = limited(lambda value: value >= 0, "at least 0", 0)
    match: str | None = field(default=None, metadata={"limit": PATTERN})


def check_nodes(config: Config) -> None:
    """Check the trainer's keys; classes check their own arguments when they are instantiated."""
    nodes = {"data.dataset": config.data.dataset, "data.task": config.data.task}
    nodes |= {"model": config.model, "optim": config.optim, "schedule": config.schedule}
    nodes |= {f"logger.{name}": node for name, node in config.logger.items()}
    if isinstance(config.comm, HookCommConfig):
        nodes["comm.hook"] = config.comm.hook
    if (adapters := config.model.get("adapters")) is not None:
        nodes["model.adapters"] = adapters
    for name in ("collate", "order"):
        if (node := getattr(config.data, name)) is not None:
            nodes[f"data.{name}"] = node
    for split in ("train_transforms", "eval_transforms"):
        for number, node in enumerate(getattr(config.data, split)):
            nodes[f"data.{split}[{number}]"] = node
    for name, node in nodes.items():
        if not isinstance(node, dict) or "_target_" not in node:
            raise UserError(f"{name} has no _target_; set it to the import path of a class or function")
    lr = config.optim.get("lr")
    if not isinstance(lr, int | float | None):
        raise UserError(f"optim.lr is {lr!r}, but must be a number")
    if lr is not None and lr < 0:
        raise UserError(f"optim.lr is {lr}, but must be at least 0")

    parameter_groups(config.optim)
    for pattern in patterns("model.freeze", config.model.get("freeze")):
        PATTERN.check("model.freeze", pattern)


def parameter_groups(optim: dict[str, Any]) -> tuple[list[ParameterGroup], NoDecay]:
    """Return `groups` and `no_decay` of `optim`, which are not passed to the optimizer."""
    nodes = optim.get("groups") or []
    if not isinstance(nodes, list):
        raise UserError(f"optim.groups is {nodes}, but must be a list: [{{match: REGEX, weight_decay: 0}}]")
    groups = [typed(ParameterGroup, f"optim.groups.{n}", node) for n, node in enumerate(nodes)]
    for number, group in enumerate(groups):
        _check_group(f"optim.groups.{number}", group)
    return groups, typed(NoDecay, "optim.no_decay", optim.get("no_decay") or {})


def _check_group(name: str, group: ParameterGroup) -> None:
    if not group.match and group.dims is None:
        raise UserError(
            f"{name}.match has no value; set it to a regex for parameter names, or set {name}.dims"
        )
    if (node := group.optimizer) is None:
        return
    if "_target_" not in node:
        raise UserError(f"{name}.optimizer has no _target_; set it to the import path of a class")
    lr = node.get("lr")
    if not isinstance(lr, int | float | None) or (lr or 0) < 0:
        raise UserError(f"{name}.optimizer.lr is {lr!r}, but must be a number >= 0")
    for key in ("lr", "weight_decay"):
        if key in node and (given := group.lr_scale if key == "lr" else group.weight_decay) is not None:
            other = "lr_scale, a factor of optim.lr," if key == "lr" else key
            raise UserError(
                f"{name}.optimizer.{key} is {node[key]}, but {name} sets {other} to {given}; remove one"
            )


def model_settings(model: dict[str, Any]) -> dict[str, Any]:
    """Return the part of `model` that is passed to its class, without the trainer's own keys."""
    own = ("init_from", "init_key", "init_ignore", "adapters", "freeze")
    return {key: value for key, value in model.items() if key not in own}


def patterns(name: str, value: Any) -> list[str]:
    """Return the setting `name` as a list; it may be null, a regular expression or a list of them."""
    listed = [value] if isinstance(value, str) else value or []
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        raise UserError(f"{name} is {value}, but must be a list of regular expressions")
    return listed


def typed(kind: type[Any], name: str, node: Any) -> Any:
    """Return `node`, the mapping in the setting `name`, as an instance of the dataclass `kind`."""
    keys = [setting.name for setting in dataclasses.fields(kind)]
    if not isinstance(node, Mapping):
        raise UserError(f"{name} is {node}, but must be a mapping with the keys {', '.join(keys)}")
    try:
        value = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), dict(node)))
    except ConfigKeyError as error:
        raise UserError(f"{name}.{error.key} is not a setting; expected one of {', '.join(keys)}") from error
    except OmegaConfBaseException as error:
        raise UserError(f"{name}.{error.full_key}: {first_line(error)}") from error
    check_limits(value, f"{name}.")
    return value
