"""Parameters with their own optimizer settings, selected by regular expressions of their names."""

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

_FUSED = (Adam, AdamW, SGD)  # torch's optimizers with one kernel for a step


def freeze(model: nn.Module, node: dict[str, Any]) -> None:
    """Exclude the parameters that `model.freeze` matches from training.

    Raises:
        UserError: an expression matches nothing, or no parameter is left to train.
    """
    parameters = dict(parameter_names(model))
    for pattern in patterns("model.freeze", node.get("freeze")):
        for name in _matched("model.freeze", pattern, parameters):
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError(f"model.freeze={node['freeze']} leaves no parameter of {len(parameters)} to train")


def build_optimizer(
    trainable: TrainableParameters, optim: dict[str, Any], fused_on_cpu: bool = True
) -> Optimizer:
    """The optimizer of `trainable.own`.

    Args:
        fused_on_cpu: whether a CPU may make a step in one kernel. Not with `train.exact`: a kernel rounds
            otherwise at the end of a tensor, so shards would differ. Not with fp16: torch's Adam then
            subtracts the flag of ShardedGradScaler, of shape (1,), from steps of shape (), an error.

    Raises:
        UserError: it cannot be built, or does not fit the model; or an error of `parameter_sets`.
    """
    sets = parameter_sets(trainable, optim)
    parts = [_part(name, trainable, optim, own, fused_on_cpu) for name, own in sets.items()]
    return parts[0] if len(parts) == 1 else CombinedOptimizer(parts)


def _part(
    name: str,
    trainable: TrainableParameters,
    optim: dict[str, Any],
    sets: list[dict[str, Any]],
    fused_on_cpu: bool,
) -> Optimizer:
    """The optimizer of the node at `name`: that of `optim`, or of one of its groups."""
    entries, _ = parameter_groups(optim)
    own = {key: value for key, value in optim.items() if key not in ("groups", "no_decay")}
    if name != "optim":
        entries = [entries[int(name.split(".")[2])]]
        own = entries[0].optimizer or {}
    optimizer = _built(name, own, sets)
    check_optimizer(optimizer)
    sparse = sparse_weights(trainable.model)
    for group in optimizer.param_groups:
        if group.get("weight_decay") and not sparse.isdisjoint(group["params"]):
            raise UserError(
                f"weight_decay is {group['weight_decay']:g}, but torch decays no weights with sparse "
                "gradients, such as those of an embedding; set it to 0, or build that with sparse=False"
            )
    if (at_once := _at_once(optimizer, own, fused_on_cpu)) and not sparse:
        own = own | at_once
        optimizer = _built(name, own, sets)
        optimizer.register_step_pre_hook(_before_fused_step)
    asked = any(entry.weight_decay is not None for entry in entries if name != "optim" or not entry.optimizer)
    if asked and "weight_decay" not in optimizer.defaults:
        raise UserError(
            f"optim.groups sets a weight_decay, but {type(optimizer).__name__} has none; leave it out, or "
            "use optim=adamw"
        )
    make = partial(_built, name, own)
    if trainable.is_sharded and needs_whole_tensors(type(optimizer).__name__, make, sets):
        return WholeTensors(optimizer, trainable)
    return optimizer


def _built(name: str, node: dict[str, Any], sets: list[dict[str, Any]]) -> Optimizer:
    named = [dict(each) for each in sets]  # copies, to which an optimizer may add its defaults
    return instantiate(name, node, named if len(sets) > 1 or len(sets[0]) > 1 else named[0]["params"])


def _at_once(optimizer: Optimizer, optim: dict[str, Any], fused_on_cpu: bool) -> dict[str, bool]:
    """The option to update all parameters at once, if they allow it and unless `optim` chooses itself.

    `fused` reads each tensor once, in a half to a quarter of the time on a CPU, and under fp16 reads on the
    device whether to skip the step: the others make the host wait for that flag.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    chosen = any(optim.get(key) is not None for key in ("fused", "foreach", "capturable"))
    fit = all(p.is_floating_point() and _is_dense(p) for p in parameters)
    known = {p.device.type for p in parameters} <= (FUSED | {"cpu"} if fused_on_cpu else FUSED)
    # Momentum from zero is as without `fused` unless it is dampened: see `_before_fused_step`.
    fit = fit and not any(group.get("dampening") for group in optimizer.param_groups)
    return {"fused": True} if type(optimizer) in _FUSED and fit and known and not chosen else {}


def _before_fused_step(optimizer: Optimizer, arguments: Any, options: Any) -> None:
    """A hook, for two faults of torch 2.14 and older.

    Fused SGD fails on a first gradient that comes later than others', for want of a momentum. From zero it
    becomes that gradient, as without `fused`, unless it is dampened. And fused Adam fails on the flag of
    ShardedGradScaler, of shape (1,).
    """
    found_inf: Any = getattr(optimizer, "found_inf", None)
    if found_inf is not None and found_inf.ndim:
        optimizer.found_inf = found_inf.reshape(())  # type: ignore[attr-defined]
    for group in optimizer.param_groups if isinstance(optimizer, SGD) else []:
        given = [each for each in group["params"] if each.grad is not None] if group["momentum"] else []
        late = [each for each in given if optimizer.state.get(each, {}).get("momentum_buffer") is None]
        for parameter in late if len(late) < len(given) else []:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _is_dense(parameter: Tensor) -> bool:
    """Whether it is laid out row by row, or as images with the channels last: autograd's gradients follow.

    Kernels of fused steps take parameter and gradient to be laid out alike; on a CPU they do not look.
    """
    as_images = parameter.ndim == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    return as_images or parameter.is_contiguous()


def parameter_sets(trainable: TrainableParameters, optim: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """`trainable.own` as groups for torch's optimizers; one without a name if all are alike.

    They are by the setting of their optimizer: `optim`, or `optim.groups.0.optimizer`. First those that no
    entry of `optim.groups` matches, then entry by entry; in each first those that decay.

    Raises:
        UserError: an entry matches nothing, scales a missing learning rate, or has another's name.
    """
    entries, no_decay = parameter_groups(optim)
    taken: dict[str, ParameterGroup] = {}
    for index, entry in enumerate(entries):
        found = _matched(f"optim.groups.{index}.match", entry.match, trainable.own)
        if entry.dims is not None:
            found = [name for name in found if trainable.own[name].ndim == entry.dims]
            if not found:
                raise UserError(
                    f"optim.groups.{index}.dims={entry.dims} selects no parameter: none of this "
                    "match has that number of dimensions"
                )
        taken |= {name: entry for name in found if name not in taken}
    rest = ParameterGroup()
    sets: dict[str, list[dict[str, Any]]] = {}
    for index, entry in enumerate((rest, *entries), start=-1):
        mine = {name: value for name, value in trainable.own.items() if taken.get(name, rest) is entry}
        setting = "optim" if entry.optimizer is None else f"optim.groups.{index}.optimizer"
        for names, decays in _halves(mine, entry, entry.optimizer or optim, no_decay):
            if names:
                title = _title(entry, decays)
                options = _options(entry, decays, optim) | ({"name": title} if title else {})
                own = sets.setdefault(setting, [])
                own.append({"params": [trainable.own[name] for name in names], **options})
    titles = [each.get("name") for of_one in sets.values() for each in of_one]
    if doubled := [title for title in titles if titles.count(title) > 1]:
        raise UserError(f"two of optim.groups have the name {doubled[0]}; give each its own name")
    return sets


def _halves(
    parameters: Mapping[str, Tensor], entry: ParameterGroup, optim: dict[str, Any], no_decay: NoDecay
) -> Iterator[tuple[list[str], bool]]:
    """Yield the names of parameters that decay as in `optim`, and of those without decay."""
    splits = entry.weight_decay is None and optim.get("weight_decay") != 0

    def is_spared(name: str) -> bool:
        by_name = no_decay.match is not None and re.search(no_decay.match, name) is not None
        return splits and (by_name or parameters[name].ndim < no_decay.below_dims)

    yield [name for name in parameters if not is_spared(name)], True
    yield [name for name in parameters if is_spared(name)], False


def _title(entry: ParameterGroup, decays: bool) -> str:
    """The name of a group; empty for all other parameters.

    A pattern that is a word but for anchors gives that word: `^blocks\\.` is blocks. `^(?!fc)` remains.
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
                "optim.groups: lr_scale multiplies optim.lr, which has no value; set it, or leave it out"
            )
        options["lr"] = lr * entry.lr_scale
    elif entry.optimizer is not None and lr is not None and entry.optimizer.get("lr") is None:
        options["lr"] = lr
    return options


def described(optimizer: Optimizer, trainable: TrainableParameters) -> dict[str, str]:
    """The size of each of several groups, its weight decay and its learning rate, for people."""
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
    found = [name for name in names if re.search(pattern, name)]
    if not found:
        near = difflib.get_close_matches(pattern, names, n=3, cutoff=0) or names
        raise UserError(
            f"{setting}={pattern} matches none of {len(names)} parameters, such as {', '.join(near)}, ..."
        )
    return found
