"""Parts of a model that are treated one at a time: gathered by FSDP, or computed again for the gradient."""

import functools
from collections.abc import Callable, Iterator

from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.errors import UserError
from trainer.strategies.base import parameter_count

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # never called


def checkpoint_activations(model: nn.Module, unit_min_params: int) -> str:
    """Have each unit keep only its inputs, and compute what lies within again when its gradient is due.

    Saves the memory of activations within units, and costs one more forward pass. To be called before the
    model is wrapped, under any strategy. Returns what was done.

    Raises:
        UserError: the model names no units, and has none of the size that is asked for.
    """
    units = getattr(model, "fsdp_units", None)
    if not units:
        units = list(units_by_size(model, unit_min_params, lambda module: True))
    if not units:
        raise UserError(
            f"strategy.activation_checkpointing: {type(model).__name__} names no fsdp_units, and none of its "
            f"modules has strategy.unit_min_params={unit_min_params} parameters; lower that"
        )
    for unit in units:
        unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)
    return f"activations of {len(units)} units are computed again in the backward pass"


def units_by_size(
    module: nn.Module, min_params: int, can_be_gathered: Callable[[nn.Module], bool]
) -> Iterator[nn.Module]:
    """The smallest submodules of at least `min_params` parameters: each is gathered and freed as one.

    Containers are passed through, since they are never called. One that shares a parameter with modules
    outside, or whose parameters are read there, is none: a parent that holds both may be.
    """
    for child in module.children():
        if parameter_count(child.parameters()) < min_params:
            continue
        within = list(units_by_size(child, min_params, can_be_gathered))
        if within or isinstance(child, CONTAINERS) or not can_be_gathered(child):
            yield from within
        else:
            yield child
