"""Which optimizers are supported."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.errors import UserError
from trainer.nested import leaves

_PART = 0.05  # of the largest change, by which an update of rows may differ: by more than rounding


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise UserError, with the way out, for an optimizer that would fail at its first step, or would not
    resume in the state in which it stopped.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"optim is a {name}; it must be a torch.optim.Optimizer")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UserError(
            f"optim: {name} evaluates the loss several times within a step, but this trainer only once; use "
            "optim=adamw, or any optimizer whose step() needs no closure"
        )
    optimized: set[Tensor] = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if (kept := _outside_of_state(optimizer, optimized)) is not None:
        raise UserError(
            f"optim: {name} keeps tensors in its attribute {kept}, which no checkpoint holds; let it keep "
            "them in self.state, under a parameter or a name"
        )


def refuse_unless_by_rows(
    build: Callable[[list[dict[str, Any]]], Optimizer], sets: list[dict[str, Any]]
) -> None:
    """Raise UserError for an optimizer whose update of some rows depends on the others.

    So it is with norms of tensors, as in LAMB, with sums over columns, as in Adafactor, and with what
    follows from all tensors. Found by steps on small tensors, whole and cut in two. An optimizer that draws
    random numbers is taken, since no two of its steps are equal.

    Args:
        build: gives a new optimizer of such groups as `sets`.
    """
    (whole, numbers), (again, _) = _stepped(build, sets, 0, 4), _stepped(build, sets, 0, 4)
    (upper, ours), (lower, theirs) = _stepped(build, sets, 0, 2), _stepped(build, sets, 2, 4)
    in_parts = [torch.cat(parts) for parts in zip(upper, lower, strict=True)]
    draws = _differ(whole, again)
    if not draws and (_differ(whole, in_parts) or not numbers == ours == theirs):
        raise UserError(
            f"optim: {type(build(sets)).__name__} updates a row of a tensor by numbers of other rows, as by "
            "a norm, but under strategy=fsdp a rank's optimizer has its own rows alone; use strategy=ddp, or "
            "optim=adamw"
        )


def _stepped(
    build: Callable[[list[dict[str, Any]]], Optimizer], sets: list[dict[str, Any]], begin: int, end: int
) -> tuple[list[Tensor], list[float]]:
    """How three steps change these rows of small tensors, and the numbers in the optimizer's groups then.

    A group has one tensor for each number of dimensions. Norms of parts are far from those of the whole.
    """
    generator, scales = torch.Generator().manual_seed(0), torch.tensor([0.1, 0.1, 1.0, 1.0])

    def rows(like: Tensor, scales: Tensor) -> Tensor:
        rest = [1] * (like.ndim - 1)
        values = torch.randn(4, *(3 * size for size in rest), generator=generator) * scales.reshape(4, *rest)
        return values[begin:end].to(like.device, like.dtype)

    groups = []
    for group in sets:
        likes = {parameter.ndim: parameter for parameter in group["params"]}.values()
        groups.append(group | {"params": [nn.Parameter(rows(like, scales)) for like in likes]})
    parameters = [parameter for group in groups for parameter in group["params"]]
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = build(groups)
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = 0.1  # that of the run may be too small to see
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = rows(parameter, scales.flip(0))
        optimizer.step()
    values = [value for group in optimizer.param_groups for value in group.values()]
    changes = [now.detach() - then for now, then in zip(parameters, before, strict=True)]
    return changes, [value for value in values if isinstance(value, float)]


def _differ(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return any((a - b).abs().max() > _PART * a.abs().max() for a, b in zip(ours, theirs, strict=True))


def sparse_weights(model: nn.Module) -> set[Tensor]:
    """The parameters with sparse gradients."""
    return {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }


def _outside_of_state(optimizer: Optimizer, optimized: set[Tensor]) -> str | None:
    """The name of an attribute with tensors, or with a stateful optimizer, that is not in `state_dict`."""
    if type(optimizer).state_dict is not Optimizer.state_dict:
        return None

    def is_own(value: object) -> bool:
        if isinstance(value, Optimizer):
            return value.state is not optimizer.state
        return isinstance(value, Tensor) and value not in optimized

    known = {"state", "param_groups", "defaults"}
    values = {name: value for name, value in vars(optimizer).items() if name not in known}
    return next((name for name, value in values.items() if any(map(is_own, leaves(value)))), None)
