"""Which parts of a model fully_shard supports, and a check for references to what it replaces."""

import functools
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from trainer.errors import UserError, first_few
from trainer.local_shard import is_dtensor, storage_of
from trainer.meta_init import named_tensors
from trainer.optim.optimizer_checks import sparse_weights
from trainer.strategies.gradient_hooks import has_gradient_hook
from trainer.strategies.placement import refuse_several_devices, refuse_shared_memory

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class StaleReferenceCheck:
    """Refuses the use of parameters that sharding has replaced, and of views of them.

    Code that refers to one other than by a module's attribute, such as by a list or a closure, would always
    compute with its initial value, and no optimizer would get its gradient.
    """

    def __init__(self, model: nn.Module) -> None:
        self._prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
        self._held: dict[str, weakref.ref[nn.Parameter]] = {}
        self._model, self._names_of_views = model, _views_of_trained(model)
        self._views: list[tuple[str, weakref.ref[Tensor]]] = []

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
        named = named_tensors(self._model) if self._names_of_views else ()
        self._views = [(name, weakref.ref(tensor)) for name, tensor in named if name in self._names_of_views]

    def after_first_pass(self) -> None:
        """Refuse views that are still there, as the old spectral norm replaces its own."""
        if held := sorted({name for name, view in self._views if view() is not None}):
            raise UserError(
                f"strategy=fsdp: {first_few(held)} is a view of a trained parameter, which sharding moves: "
                "it would keep its initial values. Take it from the parameter where it is used, or keep a "
                ".clone() of it; or use strategy=ddp"
            )


def _views_of_trained(model: nn.Module) -> set[str]:
    """The names of attributes that are in the memory of a trained parameter, and are none themselves."""
    trained = {storage_of(p) for p in model.parameters() if p.requires_grad and p.numel()}
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    others = ((name, tensor) for name, tensor in named_tensors(model) if id(tensor) not in known)
    plain = ((name, t) for name, t in others if t.layout == torch.strided and t.numel())
    return {name for name, tensor in plain if storage_of(tensor) in trained}


def _refuse_held(name: str, parameter: Tensor) -> None:
    raise UserError(
        f"strategy=fsdp: the forward pass uses {name} by a reference kept in a list, a dict or a function, "
        "which sharding cannot follow; read it from its module where it is used; or use strategy=ddp"
    )


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


def refuse_max_norm(
    model: nn.Module, strategy: str, changed: str = "here a copy, which is thrown away"
) -> None:
    """Raise UserError, by name, for an embedding that changes its weight in the forward pass."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UserError(
                f"{strategy}: {name or 'the model'} has max_norm={module.max_norm}, by which its forward "
                f"pass changes the weight: {changed}. Leave max_norm out, or use strategy=single"
            )


def refuse_scripted(model: nn.Module) -> None:
    """Raise UserError, by name, for a module that takes no forward hook."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UserError(
                f"strategy=fsdp needs a hook on {name or 'the model'}, a ScriptModule, which takes none; use "
                "strategy=ddp"
            )


def refuse_what_cannot_be_sharded(model: nn.Module, units: Iterable[nn.Module]) -> None:
    """Raise UserError, by name, for parameters that fully_shard would refuse later or less clearly."""
    refuse_several_devices(model, "strategy=fsdp")
    refuse_max_norm(model, "strategy=fsdp")
    refuse_scripted(model)
    refuse_shared_memory(model, "strategy=fsdp")
    reasons = {
        "no dimension; give them one, of size 1": lambda parameter: parameter.ndim == 0,
        "no elements; leave them out": lambda parameter: parameter.numel() == 0,
        "gaps or another order in memory; call .contiguous() before nn.Parameter": lambda parameter: (
            not parameter.is_contiguous()
        ),
        "complex numbers: torch's fully_shard would sum only their real parts": torch.is_complex,
        "a hook on the gradient, which would get shards": has_gradient_hook,
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
