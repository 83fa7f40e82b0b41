"""Weights from elsewhere: torchvision, a DDP script, a safetensors file, or a checkpoint of ours."""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from trainer.checkpoint.matching import first_five
from trainer.checkpoint.safetensors_files import read_safetensors
from trainer.checkpoint.source import whole
from trainer.errors import UserError

log = logging.getLogger(__name__)

_CONTAINERS = ("model", "state_dict", "model_state_dict")
_PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Copy the tensors in ``path`` to those of the same names in ``model``; never runs code from the file.

    ``path`` is a state_dict saved by ``torch.save`` (bare, or under ``model`` or ``state_dict``; a prefix
    ``module.`` is dropped), a ``.safetensors`` file, or the directory of a checkpoint. What it lacks keeps
    its value; both that and what is left over is listed in the log.

    Raises:
        UserError: unreadable; no name in common; or other shapes (the first five, both shapes each).
    """
    path = Path(path)
    found = _without_prefix(_read(path))
    wanted = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    common = wanted.keys() & found.keys()
    if not common:
        raise UserError(
            f"model.init_from={path} has no name in common with this model: it holds "
            f"{first_five(sorted(found))}; the model {first_five(sorted(wanted))}"
        )
    different = [
        f"{name} ({list(found[name].shape)} there, {list(wanted[name].shape)} here)"
        for name in wanted
        if name in found and found[name].shape != wanted[name].shape
    ]
    if different:
        raise UserError(f"model.init_from={path} is of another model: {first_five(different)}")
    if missing := sorted(wanted.keys() - common):
        log.warning("model.init_from=%s lacks %s: left as initialised", path, first_five(missing))
    if unexpected := sorted(found.keys() - common):
        log.warning("model.init_from=%s also holds %s: not used", path, first_five(unexpected))
    model.load_state_dict({name: found[name] for name in common}, strict=False)


def _read(path: Path) -> dict[str, Tensor]:
    if path.is_dir():
        return whole(path).read("model.")
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError as error:
        raise UserError(f"model.init_from={path} does not exist") from error
    except Exception as error:  # torch raises whatever its zip reader and unpickler stumble over
        raise UserError(
            f"model.init_from={path} is no file of plain tensors: {str(error).splitlines()[0]}"
        ) from error
    for name in _CONTAINERS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(name), Mapping):
            loaded = loaded[name]
            break
    tensors = (
        {k: v for k, v in loaded.items() if isinstance(v, Tensor)} if isinstance(loaded, Mapping) else {}
    )
    if not tensors:
        raise UserError(f"model.init_from={path} holds no named tensors, but a {type(loaded).__name__}")
    return tensors


def _without_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors
