"""The trainer's own checks of `_target_` nodes, whose other keys belong to the class they name."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from trainer.config.limits import PATTERN, check_limits, like, limited
from trainer.config.schema import Config, HookCommConfig
from trainer.errors import UserError, first_line


@dataclass
class ParameterGroup:
    """An entry of optim.groups: parameters by name, and their own settings; null: as for other parameters.

    Attributes:
        dims: only those of this number of dimensions.
        optimizer: the `_target_` node of their own optimizer.
    """

    match: str = field(default="", metadata={"limit": PATTERN})
    name: str | None = like(r"[\w.-]+", "of letters, digits and _.-: it names a curve", default=None)
    dims: int | None = limited(lambda value: value >= 0, "at least 0", None)
    weight_decay: float | None = limited(lambda value: 0 <= value < math.inf, "at least 0", None)
    lr_scale: float | None = limited(lambda value: 0 <= value < math.inf, "at least 0", None)
    optimizer: dict[str, Any] | None = None


@dataclass
class NoDecay:
    """optim.no_decay: parameters without weight decay, unless a group sets one for them."""

    below_dims: int = limited(lambda value: value >= 0, "at least 0", 0)
    match: str | None = field(default=None, metadata={"limit": PATTERN})


def check_nodes(config: Config) -> None:
    """Check what is known of a node; its class validates the rest."""
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
            raise UserError(f"{name} has no _target_; it must name the class or function to call")
    lr = config.optim.get("lr")
    if not isinstance(lr, int | float | None):
        raise UserError(f"optim.lr is {lr!r}, but must be a number")
    if lr is not None and lr < 0:
        raise UserError(f"optim.lr is {lr}, but must be at least 0")

    parameter_groups(config.optim)
    for pattern in patterns("model.freeze", config.model.get("freeze")):
        PATTERN.check("model.freeze", pattern)


def parameter_groups(optim: dict[str, Any]) -> tuple[list[ParameterGroup], NoDecay]:
    """The trainer's own part of `optim`, which is not passed to the optimizer: `groups` and `no_decay`.

    Raises:
        UserError: an unknown key, a wrong type, a value outside its limits.
    """
    nodes = optim.get("groups") or []
    if not isinstance(nodes, list):
        raise UserError(f"optim.groups is {nodes}, but must be a list: [{{match: REGEX, weight_decay: 0}}]")
    groups = [typed(ParameterGroup, f"optim.groups.{n}", node) for n, node in enumerate(nodes)]
    for number, group in enumerate(groups):
        _check_group(f"optim.groups.{number}", group)
    return groups, typed(NoDecay, "optim.no_decay", optim.get("no_decay") or {})


def _check_group(name: str, group: ParameterGroup) -> None:
    if not group.match and group.dims is None:
        raise UserError(f"{name}.match has no value; set one, a regular expression of names, or {name}.dims")
    if (node := group.optimizer) is None:
        return
    if "_target_" not in node:
        raise UserError(f"{name}.optimizer has no _target_; it must name the class to call")
    lr = node.get("lr")
    if not isinstance(lr, int | float | None) or (lr or 0) < 0:
        raise UserError(f"{name}.optimizer.lr is {lr!r}, but must be a number, at least 0")
    for key in ("lr", "weight_decay"):
        if key in node and (given := group.lr_scale if key == "lr" else group.weight_decay) is not None:
            other = "lr_scale, a factor of optim.lr," if key == "lr" else key
            raise UserError(
                f"{name}.optimizer.{key} is {node[key]}, but {name} sets {other} to {given}; leave one out"
            )


def model_settings(model: dict[str, Any]) -> dict[str, Any]:
    """The part of `model` that is passed to its class, without the trainer's own keys."""
    own = ("init_from", "init_key", "init_ignore", "adapters", "freeze")
    return {key: value for key, value in model.items() if key not in own}


def patterns(name: str, value: Any) -> list[str]:
    """A setting that is null, a regular expression, or a list of them."""
    listed = [value] if isinstance(value, str) else value or []
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        raise UserError(f"{name} is {value}, but must be a list of regular expressions")
    return listed


def typed(kind: type[Any], name: str, node: Any) -> Any:
    """The settings at ``name``, such as the trainer's own within a `_target_` node, as a ``kind``."""
    keys = [a.name for a in dataclasses.fields(kind)]
    if not isinstance(node, Mapping):
        raise UserError(f"{name} is {node}, but must hold settings: {', '.join(keys)}")
    try:
        value = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), dict(node)))
    except ConfigKeyError as error:
        raise UserError(f"{name}.{error.key} is not a setting; choose from {', '.join(keys)}") from error
    except OmegaConfBaseException as error:
        raise UserError(f"{name}.{error.full_key}: {first_line(error)}") from error
    check_limits(value, f"{name}.")
    return value
