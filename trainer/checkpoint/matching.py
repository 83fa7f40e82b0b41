"""Does a checkpoint fit this run? Decided from names, shapes and dtypes, before any tensor is read."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.errors import UserError
from trainer.state import TrainState, parameter_names

Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]


def targets_for(state: TrainState, shapes: Shapes, plain: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors to read a checkpoint into, by their saved names.

    The model's own tensors, and new memory for the optimizer's: laid out like its parameter, sharded with it,
    where it has the parameter's shape; else a plain CPU tensor, which ``Optimizer.load_state_dict`` moves.

    Raises:
        UserError: the checkpoint is of another model or optimizer; lists the first five differences of each
        kind.
    """
    ours = state.state_dict()
    targets = {f"model.{name}": value for name, value in ours["model"].items() if isinstance(value, Tensor)}
    saved = {name: shape for name, shape in shapes.items() if name.startswith("model.")}
    compare_shapes(saved, {name: (target.shape, target.dtype) for name, target in targets.items()})
    _compare_optimizers(ours["optimizer"], plain["optimizer"])
    parameters: dict[str, Tensor] = dict(parameter_names(state.model))
    for name, (shape, dtype) in shapes.items():
        if name not in targets:
            targets[name] = _new_target(name, shape, dtype, parameters)
    return targets


def compare_shapes(saved: Shapes, wanted: Shapes) -> None:
    """UserError unless both hold the same names, shapes and dtypes; shows the first five differences."""
    problems = []
    if missing := sorted(set(wanted) - set(saved)):
        problems.append(f"it lacks {first_five(missing)}")
    if unexpected := sorted(set(saved) - set(wanted)):
        problems.append(f"it also holds {first_five(unexpected)}")
    if different := [name for name in wanted if name in saved and saved[name] != wanted[name]]:
        pairs = [
            f"{name} ({_describe(*saved[name])} there, {_describe(*wanted[name])} here)" for name in different
        ]
        problems.append(f"these differ: {first_five(pairs)}")
    if problems:
        raise UserError("the checkpoint is of another model: " + "; ".join(problems))


def first_five(items: list[str]) -> str:
    more = f" and {len(items) - 5} more" if len(items) > 5 else ""
    return ", ".join(items[:5]) + more


def _compare_optimizers(ours: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    mine, theirs = ours["param_groups"], saved["param_groups"]
    if [group["params"] for group in mine] != [group["params"] for group in theirs]:
        raise UserError(
            f"the checkpoint's optimizer has {len(theirs)} groups of {[len(g['params']) for g in theirs]} "
            f"parameters, this run's has {len(mine)} of {[len(g['params']) for g in mine]}, or others: "
            "model and optim must be those of the checkpoint"
        )
    for my_group, their_group in zip(mine, theirs, strict=True):
        if missing := sorted(set(my_group) - set(their_group)):
            raise UserError(
                f"the checkpoint is of another optimizer, without {first_five(missing)}; set optim as then"
            )


def _new_target(name: str, shape: torch.Size, dtype: torch.dtype, parameters: Mapping[str, Tensor]) -> Tensor:
    parameter = parameters.get(name.removeprefix("optimizer.state.").rpartition(".")[0])
    if parameter is not None and parameter.shape == shape and len(shape) > 0:  # "step" stays on the CPU
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if isinstance(parameter, DTensor) and len(shape) > 0:
        raise UserError(f"{name} has not its parameter's shape, so it cannot be sharded; resume without FSDP")
    return torch.empty(shape, dtype=dtype)


def _describe(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
