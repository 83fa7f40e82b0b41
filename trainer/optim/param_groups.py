"""Parameter groups with their own optimizer settings, selected by regular expressions on names."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from trainer.accelerator import FUSED
from trainer.config import NoDecay, ParameterGroup, parameter_groups, patterns
from trainer.config.instantiate import instantiate
from trainer.errors import UserError
from trainer.model.plain_names import parameter_names
from trainer.model.trainable_parameters import TrainableParameters
from trainer.optim.combined import CombinedOptimizer, parts_of
from trainer.optim.optimizers import check_optimizer, sparse_weights
from trainer.optim.shard_trial import needs_whole_tensors
from trainer.optim.whole_tensors import WholeTensors

_FUSED = (Adam, AdamW, SGD)  # torch's optimizers that have fused kernels


def freeze(model: nn.Module, node: dict[str, Any]) -> None:
    """Freeze the parameters that `model.freeze` matches."""
    parameters = dict(parameter_names(model))
    for pattern in patterns("model.freeze", node.get("freeze")):
        for name in _matched("model.freeze", pattern, parameters):
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError(
            f"model.freeze={node['freeze']} freezes all {len(parameters)} parameters; at least one must stay "
            "trainable"
        )


def build_optimizer(
    trainable: TrainableParameters, optim: dict[str, Any], fused_on_cpu: bool = True
) -> Optimizer:
    """Build the optimizer of `trainable.own`.

    `fused_on_cpu` must be false with `train.exact`, because fused kernels on a CPU round the last elements of
    a tensor differently, so shards would differ; and with fp16, because fused Adam fails with the flag of
    ShardedGradScaler.
    """
    sets = parameter_sets(trainable, optim)
    parts = [_part(name, trainable, optim, groups, fused_on_cpu) for name, groups in sets.items()]
    return parts[0] if len(parts) == 1 else CombinedOptimizer(parts)


def _part(
    name: str,
    trainable: TrainableParameters,
    optim: dict[str, Any],
    sets: list[dict[str, Any]],
    fused_on_cpu: bool,
) -> Optimizer:
    """Build the optimizer of the setting `name`: `optim`, or `optim.groups.N.optimizer`."""
    entries, _ = parameter_groups(optim)
    node = {key: value for key, value in optim.items() if key not in ("groups", "no_decay")}
    if name != "optim":
        entries = [entries[int(name.split(".")[2])]]
        node = entries[0].optimizer or {}
    optimizer = _built(name, node, sets)
    check_optimizer(optimizer)
    sparse = sparse_weights(trainable.model)
    if (fused := _fused_option(optimizer, node, fused_on_cpu)) and not sparse:
        node = node | fused
        optimizer = _built(name, node, sets)
        optimizer.register_step_pre_hook(_before_fused_step)
    own_entries = [entry for entry in entries if name != "optim" or not entry.optimizer]
    if any(e.weight_decay is not None for e in own_entries) and "weight_decay" not in optimizer.defaults:
        raise UserError(
            f"optim.groups sets weight_decay, but {type(optimizer).__name__} has no weight decay; remove it "
            "from the group, or use optim=adamw"
        )
    make = partial(_built, name, node)
    if trainable.is_sharded and needs_whole_tensors(type(optimizer).__name__, make, sets):
        return WholeTensors(optimizer, trainable)
    return optimizer


def _built(name: str, node: dict[str, Any], sets: list[dict[str, Any]]) -> Optimizer:
    groups = [dict(group) for group in sets]  # copies, because an optimizer adds its defaults
    return instantiate(name, node, groups if len(sets) > 1 or len(sets[0]) > 1 else groups[0]["params"])


def _fused_option(optimizer: Optimizer, optim: dict[str, Any], fused_on_cpu: bool) -> dict[str, bool]:
    """Return {"fused": True} if the optimizer and its parameters support it and `optim` does not set `fused`.

    Fused kernels read each tensor once, which is two to four times as fast on a CPU. With fp16, they read the
    flag that skips a step on the device; other implementations make the CPU wait for the flag.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    chosen = any(optim.get(key) is not None for key in ("fused", "foreach", "capturable"))
    fits = all(p.is_floating_point() and _is_dense(p) for p in parameters)
    known = {p.device.type for p in parameters} <= (FUSED | {"cpu"} if fused_on_cpu else FUSED)
    # Without dampening, a momentum that starts from zero is correct: see `_before_fused_step`.
    fits = fits and not any(group.get("dampening") for group in optimizer.param_groups)
    return {"fused": True} if type(optimizer) in _FUSED and fits and known and not chosen else {}


def _before_fused_step(optimizer: Optimizer, arguments: Any, options: Any) -> None:
    """Work around two bugs of torch 2.14 and older, as a hook before each step.

    Fused SGD fails if a parameter gets its first gradient later than others, because its momentum is missing.
    A momentum of zero is equivalent, unless there is dampening. Fused Adam fails with the flag of
    ShardedGradScaler, because its shape is (1,).
    """
    found_inf: Any = getattr(optimizer, "found_inf", None)
    if found_inf is not None and found_inf.ndim:
        optimizer.found_inf = found_inf.reshape(())  # type: ignore[attr-defined]
    for group in optimizer.param_groups if isinstance(optimizer, SGD) else []:
        given = [p for p in group["params"] if p.grad is not None] if group["momentum"] else []
        late = [p for p in given if optimizer.state.get(p, {}).get("momentum_buffer") is None]
        for parameter in late if len(late) < len(given) else []:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _is_dense(parameter: Tensor) -> bool:
    """Return whether a parameter is contiguous or channels-last, as fused kernels assume without checking."""
    as_images = parameter.ndim == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    return as_images or parameter.is_contiguous()


def parameter_sets(trainable: TrainableParameters, optim: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Divide `trainable.own` into parameter groups; return them by the setting of their optimizer.

    The setting is `optim` or `optim.groups.N.optimizer`. Parameters that no entry of `optim.groups`
    matches come first, then each entry; within an entry, parameters with weight decay come first. If all
    parameters have the same options, there is one group without a name.
    """
    entries, no_decay = parameter_groups(optim)
    entry_of: dict[str, ParameterGroup] = {}
    for index, entry in enumerate(entries):
        names = _matched(f"optim.groups.{index}.match", entry.match, trainable.own)
        if entry.dims is not None:
            names = [name for name in names if trainable.own[name].ndim == entry.dims]
            if not names:
                raise UserError(
                    f"optim.groups.{index}.dims={entry.dims} selects no parameter: none of those that match "
                    f"{entry.match} has {entry.dims} dimensions; change dims or match"
                )
        entry_of |= {name: entry for name in names if name not in entry_of}
    rest = ParameterGroup()
    sets: dict[str, list[dict[str, Any]]] = {}
    for index, entry in enumerate((rest, *entries), start=-1):
        parameters = {n: value for n, value in trainable.own.items() if entry_of.get(n, rest) is entry}
        setting = "optim" if entry.optimizer is None else f"optim.groups.{index}.optimizer"
        for names, decays in _by_decay(parameters, entry, entry.optimizer or optim, no_decay):
            if names:
                title = _title(entry, decays)
                options = _options(entry, decays, optim) | ({"name": title} if title else {})
                groups = sets.setdefault(setting, [])
                groups.append({"params": [trainable.own[name] for name in names], **options})
    titles = [group.get("name") for groups in sets.values() for group in groups]
    if duplicates := [title for title in titles if titles.count(title) > 1]:
        raise UserError(f"two entries of optim.groups are named {duplicates[0]}; give them different names")
    return sets


def _by_decay(
    parameters: Mapping[str, Tensor], entry: ParameterGroup, optim: dict[str, Any], no_decay: NoDecay
) -> Iterator[tuple[list[str], bool]]:
    """Yield the names of the parameters with weight decay, then the names of those without."""
    splits = entry.weight_decay is None and optim.get("weight_decay") != 0

    def is_excluded(name: str) -> bool:
        by_name = no_decay.match is not None and re.search(no_decay.match, name) is not None
        return splits and (by_name or parameters[name].ndim < no_decay.below_dims)

    yield [name for name in parameters if not is_excluded(name)], True
    yield [name for name in parameters if is_excluded(name)], False


def _title(entry: ParameterGroup, decays: bool) -> str:
    """Return the name of a group; empty for the parameters that no entry matches.

    A pattern that is a word with anchors becomes that word: `^blocks\\.` becomes blocks.
    """
    word = re.sub(r"[\^$\\]", "", entry.match).strip("_.")
    title = entry.name or (word if re.fullmatch(r"[\w.-]*", word) else entry.match)
    if not title and entry.dims is not None:
        title = f"dims_{entry.dims}"
    return title if decays else f"{title}/no_decay".lstrip("/")


def _options(entry: ParameterGroup, decays: bool, optim: dict[str, Any]) -> dict[str, float]:
    options: dict[str, float] = {}
    if entry.weight_decay is not None or not decays:
        options["weight_decay"] = entry.weight_decay or 0.0
    lr = optim.get("lr")
    if entry.lr_scale is not None:
        if not isinstance(lr, int | float):
            raise UserError(
                "optim.groups: lr_scale multiplies optim.lr, which is not set; set optim.lr, or remove "
                "lr_scale"
            )
        options["lr"] = lr * entry.lr_scale
    elif entry.optimizer is not None and lr is not None and entry.optimizer.get("lr") is None:
        options["lr"] = lr
    return options


def described(optimizer: Optimizer, trainable: TrainableParameters) -> dict[str, str]:
    """Describe each group by size, weight decay and learning rate, if there are several groups."""
    groups, parts = optimizer.param_groups, parts_of(optimizer)
    kinds = [f"{type(part).__name__}, " * isinstance(optimizer, CombinedOptimizer) for part in parts]
    return {
        f"  {group.get('name', 'base')}": f"{kind}{len(group['params'])} tensors, "
        f"{sum(trainable.whole[trainable.names[own]].numel() for own in group['params']):,} parameters"
        + "".join(f", {key} {group[key]:g}" for key in ("weight_decay", "initial_lr") if key in group)
        for group, kind in zip(groups, kinds, strict=True)
        if len(groups) > 1
    }


def _matched(setting: str, pattern: str, names: Iterable[str]) -> list[str]:
    names = list(names)
    matched = [name for name in names if re.search(pattern, name)]
    if not matched:
        near = difflib.get_close_matches(pattern, names, n=3, cutoff=0) or names
        raise UserError(
            f"{setting}={pattern} matches none of the {len(names)} parameters, such as {', '.join(near)}, ..."
        )
    return matched
