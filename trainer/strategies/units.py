"""Units: the modules that FSDP gathers one at a time, or whose activations are recomputed."""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trainer.config import UnitsConfig
from trainer.errors import UserError
from trainer.strategies.base import parameter_count
from trainer.torch_private import OpOverload

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # never called
# They read weights of their submodules without calling these.
_INDIVISIBLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
# Names for groups of ATen's operations; each attention kernel is a separate operation.
_FAMILIES = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm"),
    "convolution": ("convolution",),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_varlen_attn",  # for packed documents
    ),
}


def checkpoint_activations(model: nn.Module, settings: UnitsConfig, compiled: bool = False) -> str:
    """Make units store only their inputs, and recompute their activations in the backward pass.

    This saves the memory of activations within units, at the cost of up to one more forward pass. Call it
    before the model is wrapped, under any strategy.

    Args:
        settings: `every` selects every n-th unit, starting with the first; `keep` names operations whose
            results are stored, so that only cheap operations are recomputed.
        compiled: whether the model will be compiled. torch.compile handles buffers itself, and supports only
            `keep`.

    Raises:
        UserError: the model has no fsdp_units and no module of the required size, an entry of fsdp_units
            can't be a unit, or `keep` names an unknown operation.
    """
    units = named_units(model)
    if not units:
        units = list(units_by_size(model, settings.unit_min_params, lambda module: True))
    if not units:
        raise UserError(
            f"strategy.activation_checkpointing: {type(model).__name__} has no fsdp_units, and none of its "
            f"modules has at least strategy.unit_min_params={settings.unit_min_params} parameters; lower "
            "this setting"
        )
    kept = settings.activation_checkpointing_keep
    selective = functools.partial(create_selective_checkpoint_contexts, _operations(kept)) if kept else None
    chosen = units[:: settings.activation_checkpointing_every]
    for unit in chosen:
        options: dict[str, Any] = {"context_fn": selective} if selective is not None else {}
        if not compiled and any(True for _ in unit.buffers()):
            options = {"context_fn": functools.partial(_keeping_buffers, unit, selective)}
        unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False, **options)
    total = f" of {len(units)}" * (len(chosen) < len(units))
    exceptions = f", except {', '.join(kept)}" * bool(kept)
    return f"activations of {len(chosen)}{total} units are recomputed in the backward pass{exceptions}"


def _keeping_buffers(
    unit: nn.Module, selective: Callable[[], Any] | None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a forward pass and of its recomputation.

    The second context restores the buffers, because running statistics would otherwise count each batch
    twice.
    """
    first, again = selective() if selective is not None else (nullcontext(), nullcontext())

    @contextmanager
    def repetition() -> Iterator[None]:
        before = [(buffer, buffer.detach().clone()) for buffer in unit.buffers()]
        try:
            with again:
                yield
        finally:
            for buffer, value in before:
                buffer.data.copy_(value)  # without autograd, which may have saved the buffer for the gradient

    return first, repetition()


def _operations(names: Sequence[str]) -> list[OpOverload]:
    """Return all overloads of the ATen operations in `names`. Raise UserError for an unknown name."""
    operations, spaces = list[OpOverload](), (torch.ops.aten, torch.ops.torch_attn)
    if "attention" in names and torch.accelerator.is_available():
        importlib.import_module("torch.nn.attention.varlen")  # registers _varlen_attn; takes 3 s
    for name in names:
        packets = [getattr(space, each, None) for space in spaces for each in _FAMILIES.get(name, (name,))]
        if not any(packets):
            raise UserError(
                f"strategy.activation_checkpointing_keep: unknown operation {name}; use "
                f"{', '.join(_FAMILIES)}, or the name of an ATen operation, such as mm or gelu"
            )
        operations += [getattr(packet, each) for packet in packets if packet for each in packet.overloads()]
    return operations


def named_units(model: nn.Module) -> list[nn.Module]:
    """Return the distinct submodules in the model's `fsdp_units`; [] if it has no such attribute.

    Raises:
        UserError: an entry is not a submodule, or is never called.
    """
    given, kind = inspect.getattr_static(model, "fsdp_units", None), type(model).__name__
    if isinstance(given, property) and given.fget is not None:
        named = given.fget(model)  # nn.Module would report an AttributeError in it as a missing attribute
    else:
        named = getattr(model, "fsdp_units", None)
    if not isinstance(named, Iterable) and named is not None:
        raise UserError(
            f"fsdp_units of {kind} is {_short(named)}; it must be a list of submodules, or a property that "
            "returns one"
        )
    names = {id(module): name for name, module in model.named_modules()}
    units = {id(unit): unit for unit in named or ()}
    for key, unit in units.items():
        if not names.get(key):
            hint = "; list the modules themselves, not their names" if isinstance(unit, str) else ""
            raise UserError(f"fsdp_units of {kind} contains {_short(unit)}, which is not a submodule{hint}")
        if isinstance(unit, CONTAINERS):
            raise UserError(
                f"fsdp_units of {kind} contains {names[key]}, a {type(unit).__name__}, which is never called "
                "and so cannot be a unit; list the modules in it instead"
            )
    return list(units.values())


def _short(value: object) -> str:
    return type(value).__name__ if isinstance(value, nn.Module) else repr(value)[:60]


def units_by_size(
    module: nn.Module, min_params: int, can_be_gathered: Callable[[nn.Module], bool]
) -> Iterator[nn.Module]:
    """Yield the smallest submodules with at least `min_params` parameters.

    Containers are never called, so only the modules in them may be units. A module that shares a parameter
    with a module outside it is not a unit, but a parent of both may be.
    """
    for child in module.children() if not isinstance(module, _INDIVISIBLE) else ():
        if parameter_count(child.parameters()) < min_params:
            continue
        within = list(units_by_size(child, min_params, can_be_gathered))
        if within or isinstance(child, CONTAINERS) or not can_be_gathered(child):
            yield from within
        else:
            yield child
