"""Whether a checkpoint fits this run: decided from names, shapes and dtypes, before any tensor is read."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.tree import put_together
from trainer.errors import UserError
from trainer.files.untrusted import first_five
from trainer.local_shard import is_dtensor
from trainer.optim.combined import has_user_part
from trainer.optim.continued import OF_SCHEDULES
from trainer.optim.train_state import TrainState

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
    _compare_optimizers(ours["optimizer"], plain["optimizer"], has_user_part(state.optimizer))
    targets |= {
        f"buffers.{name}": value for name, value in ours["buffers"].items() if _fits(name, value, shapes)
    }
    targets |= _averages(ours, shapes)
    for name, (shape, dtype) in shapes.items():
        if name not in targets and not name.startswith(("buffers.", "ema.")):
            targets[name] = _new_target(name, shape, dtype, state.trained.whole)
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


def _compare_optimizers(ours: Mapping[str, Any], saved: Mapping[str, Any], is_users: bool) -> None:
    """Raise UserError unless both train the same parameters, and `saved` has all options of our groups.

    Groups may be others, by new settings; not of an optimizer of the user's, which may keep state in them.
    """
    mine, theirs = ours["param_groups"], saved["param_groups"]
    there = {name: group for group in theirs for name in group["params"]}
    here = {name: group for group in mine for name in group["params"]}
    members = [[group["params"] for group in groups] for groups in (mine, theirs)]
    if here.keys() != there.keys() or (is_users and members[0] != members[1]):
        moved = [
            f"{name} ({_group(there, name)} there, {_group(here, name)} here)"
            for name in {**there, **here}
            if _group(there, name) != _group(here, name)
        ]
        raise UserError(
            f"the checkpoint's optimizer has {len(there)} parameters in {len(theirs)} groups, this run's "
            f"{len(here)} in {len(mine)}: {first_five(moved) or 'in another order'}; model, model.freeze"
            + ", optim.groups, optim.weight_decay and optim.undecayed" * is_users
            + " must be those of the checkpoint"
        )
    for group in mine:
        theirs_of_it = set(there[group["params"][0]])
        if missing := sorted(set(group) - theirs_of_it - OF_SCHEDULES - {"name"}):
            raise UserError(
                f"the checkpoint is of another optimizer, without {first_five(missing)}; set optim as it was"
            )


def _group(groups: Mapping[str, Mapping[str, Any]], name: str) -> str:
    return str(groups[name].get("name", "base")) if name in groups else "not trained"


def _new_target(name: str, shape: torch.Size, dtype: torch.dtype, parameters: Mapping[str, Tensor]) -> Tensor:
    """A tensor to read the optimizer's tensor ``name`` into, as `targets_for` says."""
    parameter = parameter_of(name, shape, parameters)
    if parameter is not None and parameter.shape == shape and len(shape) > 0:  # "step" stays on the CPU
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype)


def parameter_of(name: str, shape: torch.Size, parameters: Mapping[str, Tensor]) -> Tensor | None:
    """The parameter to whose state the optimizer's tensor ``name`` belongs, maybe in lists; None without one.

    Raises:
        UserError: it is sharded, and the tensor has another shape.
    """
    prefix = name.removeprefix("optimizer.state.")
    while prefix and prefix not in parameters:
        prefix = prefix.rpartition(".")[0]
    parameter = parameters.get(prefix)
    if is_dtensor(parameter) and len(shape) > 0 and shape != parameter.shape:
        words = "has another shape than its parameter and cannot be sharded; resume, or begin, without FSDP"
        raise UserError(f"{name} {words}")
    return parameter


def _describe(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
