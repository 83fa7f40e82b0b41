"""Whether a checkpoint fits this run: decided from names, shapes and dtypes, before any tensor is read."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Muon

from trainer.checkpoint.tree import put_together
from trainer.errors import UserError, first_few
from trainer.files.untrusted import printable
from trainer.optim.plain_names import parameter_names
from trainer.optim.several import has_user_part, parts_of
from trainer.optim.train_state import TrainState
from trainer.optim.whole_matrices import WholeMatrices

Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Of saved tensors, by their names in the checkpoint."""


def targets_for(state: TrainState, shapes: Shapes, plain: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors to read a checkpoint into, by their saved names.

    These are the model's own tensors, its other buffers if they were saved in the same size, and new tensors
    for the optimizer's state: laid out and sharded like the parameter if they have its shape, otherwise on
    the CPU, from where ``Optimizer.load_state_dict`` moves them.

    Args:
        plain: the JSON part of the saved state.

    Raises:
        UserError: the checkpoint is of another model or optimizer; lists the first five differences of each
        kind.
    """
    ours = state.state_dict()
    targets = model_targets(ours["model"], shapes)
    _compare_optimizers(ours["optimizer"], plain["optimizer"])
    targets |= {
        f"buffers.{name}": value for name, value in ours["buffers"].items() if _fits(name, value, shapes)
    }
    targets |= _averages(ours, shapes)
    parameters: dict[str, Tensor] = dict(parameter_names(state.model))
    for name, (shape, dtype) in shapes.items():
        if name not in targets and not name.startswith(("buffers.", "ema.")):
            targets[name] = _new_target(name, shape, dtype, parameters)
    return targets


def model_targets(ours: Mapping[str, Any], shapes: Shapes) -> dict[str, Tensor]:
    """The tensors to read the model's part of a checkpoint into, by their saved names.

    These are the tensors in ``ours``, its own state dict, and new ones for the extra state of its modules.

    Raises:
        UserError: the checkpoint is of another model.
    """
    named = {f"model.{name}": value for name, value in ours.items() if isinstance(value, Tensor)}
    own = {name: value for name, value in named.items() if not is_extra_state(name)}
    saved = {name: shape for name, shape in shapes.items() if name.startswith("model.")}
    kept = {name: shapes[name] for name in saved if is_extra_state(name)}
    compare_shapes(
        {name: shape for name, shape in saved.items() if name not in kept},
        {name: (target.shape, target.dtype) for name, target in own.items()},
    )
    return own | {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in kept.items()}


def is_extra_state(name: str) -> bool:
    """Whether the tensor is from ``get_extra_state`` of a module, and may have any shape and dtype."""
    return "_extra_state" in name.split(".")


def other_buffers(state: TrainState, shapes: Shapes) -> str:
    """The non-persistent buffers that ``targets_for`` leaves out: the first five names, or ""."""
    own = state.state_dict()["buffers"]
    return first_five(sorted(name for name, value in own.items() if not _fits(name, value, shapes)))


def begins_average(state: TrainState, shapes: Shapes) -> bool:
    """Whether this run keeps a moving average that the checkpoint does not have."""
    return state.average is not None and not _averages(state.state_dict(), shapes)


def _averages(ours: Mapping[str, Any], shapes: Shapes) -> dict[str, Tensor]:
    """This run's moving averages by their names in a checkpoint; {} unless that holds them all."""
    own = {f"ema.weights.{name}": value for name, value in ours["ema"].get("weights", {}).items()}
    fit = all(shapes.get(name) == (value.shape, value.dtype) for name, value in own.items())
    return own if fit else {}


def _fits(name: str, buffer: Tensor, shapes: Shapes) -> bool:
    return shapes.get(f"buffers.{name}") == (buffer.shape, buffer.dtype)


def saved_state(plain: Mapping[str, Any], targets: Mapping[str, Tensor]) -> dict[str, Any]:
    """The saved state for ``TrainState.load_state_dict``, made of ``plain`` and ``targets``.

    Called before these are read, to check that it fits, and after, to load it.
    """
    buffers = plain.get("buffers", {})
    read = {name: value for name, value in buffers.items() if f"buffers.{name}" in targets}
    average = plain.get("ema", {}) if any(name.startswith("ema.") for name in targets) else {}
    saved: dict[str, Any] = put_together({**plain, "buffers": read, "ema": average}, targets)
    return saved


def check_fits(state: TrainState, plain: Mapping[str, Any], targets: Mapping[str, Tensor]) -> None:
    """Raise UserError if something is missing in the saved state, or a value has another type than here."""
    ours, saved = state.state_dict(), saved_state(plain, targets)
    _compare_kinds(saved["ema"], ours["ema"], "ema", required=ours["ema"].keys() if saved["ema"] else ())
    if saved["model"].keys() != ours["model"].keys():
        raise UserError("the checkpoint is of another model: its state does not name this model's tensors")
    parameters = dict(parameter_names(state.model))
    foreign = [str(key) for key in saved["optimizer"]["state"] if key not in parameters]
    if foreign and not has_user_part(state.optimizer):  # which may keep state of no parameter
        raise UserError(
            f"the checkpoint's optimizer has state of unknown parameters: {first_five(sorted(foreign))}"
        )
    for name in saved["optimizer"]["state"].keys() & parameters.keys():
        _compare_kinds(saved["optimizer"]["state"][name], {}, f"optimizer.state.{name}")
    _check_optimizer_state(state, saved["optimizer"])
    _compare_kinds(saved["optimizer"]["param_groups"], ours["optimizer"]["param_groups"], "param_groups")
    if state.scaler.is_enabled() and saved["scaler"]:
        _compare_kinds(saved["scaler"], ours["scaler"], "scaler", required=ours["scaler"].keys())
    schedule = {"last_epoch", "_step_count", "base_lrs"} & ours["schedule"].keys()
    _compare_kinds(saved["schedule"], ours["schedule"], "schedule", required=schedule)
    own = set(dir(type(state.schedule))) | {"optimizer"}
    if hidden := sorted(own & (saved["schedule"].keys() - ours["schedule"].keys())):
        raise UserError(f"the checkpoint's schedule would replace {first_five(hidden)}")
    _compare_kinds(saved["progress"], ours["progress"], "progress", required=ours["progress"].keys())
    _compare_kinds(saved.get("early_end", {}), ours["early_end"], "early_end")


def _check_optimizer_state(state: TrainState, saved: Mapping[str, Any]) -> None:
    """Raise UserError if a parameter's state lacks what a step of the optimizer creates, or has other shapes.

    A step on a small parameter, of size 2 in each dimension, shows what it creates. Only for torch's own
    optimizers: others may treat parameters differently.
    """
    parameters = dict(parameter_names(state.model))
    for part, group in zip(parts_of(state.optimizer), saved["param_groups"], strict=True):
        kind = Muon if isinstance(part, WholeMatrices) else type(part)
        if not kind.__module__.startswith("torch.optim."):
            continue
        made: dict[int, dict[str, Any]] = {}
        for name in group["params"]:
            found, shape = saved["state"].get(name), parameters[name].shape
            if not found:  # it never had a gradient
                continue
            if len(shape) not in made:
                made[len(shape)] = _state_after_one_step(kind, group, len(shape))
            for key, value in made[len(shape)].items():
                where = f"optimizer.state.{name}.{key}"
                if key not in found:
                    raise UserError(f"the checkpoint lacks {printable(where)}")
                _compare_kinds(found[key], value, where)
                like_parameter = getattr(value, "shape", ()) == (2,) * len(shape)
                if like_parameter and getattr(found[key], "shape", None) != shape:
                    raise UserError(
                        f"the checkpoint's {printable(where)} does not have its parameter's shape"
                    )


def _state_after_one_step(kind: type[Any], group: Mapping[str, Any], ndim: int) -> dict[str, Any]:
    """The state that an optimizer of class ``kind`` keeps for a parameter of shape (2,) * ``ndim``.

    {} if a step here fails.
    """
    parameter = torch.zeros((2,) * ndim, requires_grad=True)
    parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer = kind([{**group, "params": [parameter]}])
        optimizer.step()
    except Exception:  # it needs a closure, sparse gradients or a GPU: the run's own step will show errors
        return {}
    return dict(optimizer.state[parameter])


def _compare_kinds(saved: Any, ours: Any, where: str, required: Iterable[str] = ()) -> None:
    """Raise UserError unless ``saved`` can replace ``ours``: numbers for numbers, texts for texts.

    None can replace anything. Of two mappings only the common keys are compared, but ``required`` must exist.
    """
    number = (bool, int, float, Tensor)
    if saved is None or ours is None or (isinstance(saved, number) and isinstance(ours, number)):
        return
    if isinstance(saved, Mapping) and isinstance(ours, Mapping):
        if missing := sorted(set(required) - set(saved)):
            raise UserError(f"the checkpoint's {where} lacks {first_five(missing)}")
        for key in saved.keys() & ours.keys():
            _compare_kinds(saved[key], ours[key], f"{where}.{key}")
    elif isinstance(saved, list | tuple) and isinstance(ours, list | tuple):
        # How many there are is a setting (milestones) or follows from the parameter groups.
        if len(saved) != len(ours) and (isinstance(ours, tuple) or where.endswith("lrs")):
            raise UserError(f"the checkpoint's {where} has {len(saved)} values, this run's {len(ours)}")
        for index, item in enumerate(saved):
            _compare_kinds(item, ours[min(index, len(ours) - 1)] if ours else None, f"{where}.{index}")
    elif type(saved) is not type(ours):
        theirs, own = printable(repr(saved)), printable(repr(ours))
        raise UserError(f"the checkpoint's {printable(where)} is {theirs}, this run's {own}")


def compare_shapes(
    saved: Shapes,
    wanted: Shapes,
    words: str = "the checkpoint is of another model",
    sides: tuple[str, str] = ("there", "here"),
    way_out: str = "",
) -> None:
    """Raise UserError unless names, shapes and dtypes are equal; shows the first five differences.

    Args:
        words: the beginning of the message.
        sides: what ``saved`` and ``wanted`` are called in it.
        way_out: the end of the message.
    """
    problems = []
    if missing := sorted(set(wanted) - set(saved)):
        problems.append(f"it lacks {first_five(missing)}")
    if unexpected := sorted(set(saved) - set(wanted)):
        problems.append(f"it also holds {first_five(unexpected)}")
    if different := [name for name in wanted if name in saved and saved[name] != wanted[name]]:
        pairs = [
            f"{name} ({_describe(*saved[name])} {sides[0]}, {_describe(*wanted[name])} {sides[1]})"
            for name in different
        ]
        problems.append(f"these differ: {first_five(pairs)}")
    if problems:
        raise UserError(f"{words}: {'; '.join(problems)}{way_out}")


def first_five(items: list[str]) -> str:
    """As `first_few`, escaped: a checkpoint may name anything."""
    return first_few(map(printable, items))


def _compare_optimizers(ours: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise UserError unless both have the same groups of parameters, and ``saved`` all options of these."""
    mine, theirs = ours["param_groups"], saved["param_groups"]
    if [group["params"] for group in mine] != [group["params"] for group in theirs]:
        raise UserError(_other_groups(mine, theirs))
    for my_group, their_group in zip(mine, theirs, strict=True):
        if missing := sorted(set(my_group) - set(their_group)):
            raise UserError(
                f"the checkpoint is of another optimizer, without {first_five(missing)}; set optim as then"
            )


def _other_groups(mine: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> str:
    """The differences, and what to set: groups come from the settings, not from a checkpoint."""
    here = {name: group.get("name", "base") for group in mine for name in group["params"]}
    there = {name: group.get("name", "base") for group in theirs for name in group["params"]}
    moved = [
        f"{name} ({there.get(name, 'not trained')} there, {here.get(name, 'not trained')} here)"
        for name in {**there, **here}
        if there.get(name) != here.get(name)
    ]
    sizes = [[len(group["params"]) for group in groups] for groups in (theirs, mine)]
    undo = "; set optim.undecayed=null, as it had one group for all" if len(theirs) == 1 < len(mine) else ""
    return (
        f"the checkpoint's optimizer has {len(theirs)} groups of {sizes[0]} parameters, this run's has "
        f"{len(mine)} of {sizes[1]}: {first_five(moved) or 'in another order'}; model, model.freeze, "
        f"optim.groups and optim.undecayed must be those of the checkpoint{undo}"
    )


def _new_target(name: str, shape: torch.Size, dtype: torch.dtype, parameters: Mapping[str, Tensor]) -> Tensor:
    """A tensor to read the optimizer's tensor ``name`` into, as `targets_for` says."""
    parameter = _refuse_cut(name, shape, parameters)
    if parameter is not None and parameter.shape == shape and len(shape) > 0:  # "step" stays on the CPU
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype)


def _refuse_cut(name: str, shape: torch.Size, parameters: Mapping[str, Tensor]) -> Tensor | None:
    """The parameter to whose state the optimizer's tensor ``name`` belongs, maybe in lists; None without one.

    Raises:
        UserError: it is sharded, and the tensor has another shape.
    """
    prefix = name.removeprefix("optimizer.state.")
    while prefix and prefix not in parameters:
        prefix = prefix.rpartition(".")[0]
    parameter = parameters.get(prefix)
    if isinstance(parameter, DTensor) and len(shape) > 0 and shape != parameter.shape:
        words = "has another shape than its parameter and cannot be sharded; resume, or begin, without FSDP"
        raise UserError(f"{name} {words}")
    return parameter


def check_own(state: TrainState, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Raise UserError if no resume of this run would take the optimizer's part of what it saves."""
    parameters = dict(parameter_names(state.model))
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _refuse_cut(name, tensor.shape, parameters)
    check_fits(state, facts["state"], tensors)


def _describe(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
