"""Parameters, buffers and modules of a model by their plain names, without the prefixes of wrappers."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.torch_private import with_versions

# Prefixes that torch.compile and activation checkpointing add to parameter names.
_WRAPPER_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of `model`, sharded or not, by plain names."""
    return {plain_name(name): value for name, value in model.state_dict().items()}


def load_model_state(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load a state dict that `model_state` returned, with the modules' versions, which MNASNet requires."""
    names = {plain_name(name): name for name in model.state_dict()}
    by_model_name = {names.get(name, name): value for name, value in saved.items()}
    model.load_state_dict(with_versions(by_model_name, model))


def parameter_names(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter once, with its plain name."""
    for name, parameter in model.named_parameters():
        yield plain_name(name), parameter


def every_parameter(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter with its plain name; yield a tied parameter under each of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield plain_name(name), parameter


def buffers_outside(model: nn.Module, in_model_state: set[str]) -> dict[str, Tensor]:
    """Return the buffers that are not in the model's state dict, by their plain names."""
    named = ((plain_name(name), buffer) for name, buffer in _dense_buffers(model))
    return {name: buffer for name, buffer in named if name not in in_model_state}


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each dense buffer under each of its plain names; training does not change sparse buffers."""
    for name, buffer in _dense_buffers(model, remove_duplicate=False):
        yield plain_name(name), buffer


def buffer_locations(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the module and attribute name of each of `named_buffers`, because tensors may be replaced."""
    paths = {name: name.rpartition(".") for name, _ in _dense_buffers(model, remove_duplicate=False)}
    return {plain_name(name): (model.get_submodule(path), own) for name, (path, _, own) in paths.items()}


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module under each of its plain names; a wrapped module comes after its wrapper."""
    for name, module in model.named_modules(remove_duplicate=False):
        yield plain_name(name), module


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that override `get_extra_state`, by the name of that state in a state dict."""
    return {
        f"{name}._extra_state".lstrip("."): module
        for name, module in named_modules(model)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def buffer_names(model: nn.Module) -> set[str]:
    """Return the dotted paths of buffers in the state dict of a checkpoint."""
    names = [name for name, _ in named_buffers(model)]
    return {f"{part}.{name}" for part in ("model", "buffers", "ema.weights") for name in names}


def _dense_buffers(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    named = model.named_buffers(remove_duplicate=remove_duplicate)
    return ((name, buffer) for name, buffer in named if buffer.layout == torch.strided)


def plain_name(name: str) -> str:
    """Return `name` without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)
