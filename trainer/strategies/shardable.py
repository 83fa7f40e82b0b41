"""Which parts of a model fully_shard supports, and a check for references to what it replaces."""

import functools
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from trainer.errors import UserError, first_few
from trainer.optim.optimizers import sparse_weights
from trainer.strategies.placement import refuse_several_devices, refuse_shared_memory
from trainer.tensors.local_shard import is_dtensor

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _refuse_held(name: str, parameter: Tensor) -> None:
    raise UserError(
        f"strategy=fsdp: the forward pass uses {name} by a reference kept in a list, a dict or a function, "
        "which sharding cannot follow; read it from its module where it is used; or use strategy=ddp"
    )


class StaleReferenceCheck:
    """Refuses the use of parameters that sharding has replaced.

    Code that refers to one other than by a module's attribute, such as by a list or a closure, would always
    compute with its initial value, and no optimizer would get its gradient.
    """

    def __init__(self, model: nn.Module) -> None:
        self._prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
        self._held: dict[str, weakref.ref[nn.Parameter]] = {}

    def note(self, unit: nn.Module) -> None:
        """Record, by weak references, the parameters of `unit`, which is sharded next."""
        for name, parameter in unit.named_parameters():
            if not is_dtensor(parameter):
                self._held[self._prefixes[unit] + name] = weakref.ref(parameter)

    def guard(self) -> None:
        """Have the first gradient of a replaced parameter end the run; an unused reference is allowed."""
        for name, reference in self._held.items():
            parameter = reference()
            if parameter is not None and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(functools.partial(_refuse_held, name))


def holders_of(model: nn.Module) -> dict[object, set[nn.Module]]:
    """The modules that have each parameter, or module, as an attribute: several, if it is shared."""
    holders: dict[object, set[nn.Module]] = {}
    for module in model.modules():
        for held in (*module.parameters(recurse=False), *module.children()):
            holders.setdefault(held, set()).add(module)
    return holders


def is_closed(module: nn.Module, holders: dict[object, set[nn.Module]]) -> bool:
    """Whether no module outside has a parameter of `module`: fully_shard cannot have one in two units."""
    within = set(module.modules())
    parts = (part for part in within - {module} if any(True for _ in part.parameters()))
    return all(holders[held] <= within for held in (*module.parameters(), *parts))


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """The batch norms with a weight beside their running statistics."""
    return [module for module in model.modules() if isinstance(module, BATCH_NORMS) and module.affine]


def refuse_what_cannot_be_sharded(model: nn.Module, units: Iterable[nn.Module]) -> None:
    """Raise UserError, by name, for parameters that fully_shard would refuse later or less clearly."""
    refuse_several_devices(model, "strategy=fsdp")
    refuse_shared_memory(model, "strategy=fsdp")
    reasons = {
        "no dimension; give them one, of size 1": lambda parameter: parameter.ndim == 0,
        "no elements; leave them out": lambda parameter: parameter.numel() == 0,
        "gaps or another order in memory; call .contiguous() before nn.Parameter": lambda parameter: (
            not parameter.is_contiguous()
        ),
        "complex numbers: torch's fully_shard would sum only their real parts": torch.is_complex,
        "a hook on the gradient, which would get shards": lambda parameter: bool(
            parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        ),
        "a sparse gradient; build the embedding with sparse=False": sparse_weights(model).__contains__,
    }
    for reason, applies in reasons.items():
        if found := [name for name, parameter in model.named_parameters() if applies(parameter)]:
            raise UserError(
                f"strategy=fsdp cannot shard {first_few(found)}: parameters with {reason}; or use "
                "strategy=ddp"
            )
    names = {parameter: name for name, parameter in model.named_parameters()}
    taken: set[nn.Parameter] = set()
    for unit in (*units, model):
        dtypes: dict[torch.dtype, str] = {}
        for parameter in unit.parameters():
            if parameter not in taken and parameter.requires_grad:
                dtypes.setdefault(parameter.dtype, names[parameter])
            taken.add(parameter)
        if len(dtypes) > 1:
            listed = " beside ".join(f"{dtype} in {name}" for dtype, name in dtypes.items())
            raise UserError(
                f"strategy=fsdp gathers a unit's parameters as one, but finds {listed}: add the module of "
                "one of the two to the model's fsdp_units, give both the same dtype, or use strategy=ddp"
            )
