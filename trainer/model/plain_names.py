"""What a model holds, by the names of the plain module, without the prefixes of wrappers."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.torch_private import with_versions

# Prefixes that torch.compile and activation checkpointing add to parameter names.
_WRAPPER_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def model_state(model: nn.Module) -> dict[str, Any]:
    """The state dict of `model`, sharded or not, under the names of the plain module.

    torch.distributed.checkpoint.state_dict has this too, for more kinds of wrappers; to import it is 2 % of
    the CPU time of a start.
    """
    return {plain_name(name): value for name, value in model.state_dict().items()}


def load_model_state(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load what `model_state` gave into `model`, sharded or not.

    Modules are told their own version, as `Module.state_dict` would: torchvision's MNASNet takes no other.

    Raises:
        RuntimeError: names or shapes differ from those of `model`.
    """
    names = {plain_name(name): name for name in model.state_dict()}
    by_own_names = {names.get(name, name): value for name, value in saved.items()}
    model.load_state_dict(with_versions(by_own_names, model))


def parameter_names(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter once, under its name in the plain module."""
    for name, parameter in model.named_parameters():
        yield plain_name(name), parameter


def every_parameter(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """As `parameter_names`; a tied parameter comes under each of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield plain_name(name), parameter


def buffers_outside(model: nn.Module, in_model_state: set[str]) -> dict[str, Tensor]:
    """Buffers outside the model's state dict, which forward may use and change."""
    named = ((plain_name(name), buffer) for name, buffer in _dense_buffers(model))
    return {name: buffer for name, buffer in named if name not in in_model_state}


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each dense buffer under each of its names in the plain module; sparse ones stay as they were built."""
    for name, buffer in _dense_buffers(model, remove_duplicate=False):
        yield plain_name(name), buffer


def places_of_buffers(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the module and attribute of each of `named_buffers`; forward may replace the tensor."""
    parts = {name: name.rpartition(".") for name, _ in _dense_buffers(model, remove_duplicate=False)}
    return {plain_name(name): (model.get_submodule(prefix), own) for name, (prefix, _, own) in parts.items()}


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each module under each of its names in the plain module; of wrappers, the one within comes last."""
    for name, module in model.named_modules(remove_duplicate=False):
        yield plain_name(name), module


def keepers_of_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with a `get_extra_state` of their own, by the name of that state in a state dict."""
    return {
        f"{name}._extra_state".lstrip("."): module
        for name, module in named_modules(model)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def buffer_names(model: nn.Module) -> set[str]:
    """The dotted paths of buffers in a state dict."""
    names = [name for name, _ in named_buffers(model)]
    return {f"{part}.{name}" for part in ("model", "buffers", "ema.weights") for name in names}


def _dense_buffers(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    named = model.named_buffers(remove_duplicate=remove_duplicate)
    return ((name, buffer) for name, buffer in named if buffer.layout == torch.strided)


def plain_name(name: str) -> str:
    """The name in the plain module of what wrappers call `name`."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)
