"""Weights from elsewhere: files of torch or safetensors, a folder of transformers, a checkpoint or a run."""

import itertools
import logging
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.fits import unusual
from trainer.checkpoint.listing import Listing
from trainer.checkpoint.manifest import MANIFEST
from trainer.checkpoint.open_checkpoint import OpenCheckpoint, first_intact, verified
from trainer.checkpoint.reading import PlainFile, opened
from trainer.checkpoint.safetensors_files import INDEX, SINGLE, tensors_in
from trainer.checkpoint.tree import is_extra_state
from trainer.errors import Fault, UserError, kind_of
from trainer.files.address import Address, Location, location
from trainer.files.untrusted import Fields, first_five, printable, read_json, reason

log = logging.getLogger(__name__)

_CONTAINERS = ("model", "state_dict", "model_state_dict")
# Of DistributedDataParallel, of torch.compile, and of Lightning, where the model is an attribute of a module.
_PREFIXES = ("module.", "_orig_mod.", "model.")


def load_weights(model: nn.Module, path: str | Location, ignore: str | Sequence[str] = ()) -> None:
    """Copy what ``weights_for`` finds into ``model``. Raises as that."""
    model.load_state_dict(weights_for(model, path, ignore), strict=False)


def weights_for(
    model: nn.Module, path: str | Location, ignore: str | Sequence[str] = ()
) -> dict[str, Tensor]:
    """The tensors in ``path`` for those of the same names in ``model``; never runs code from the file.

    Prefixes that wrappers put before names are dropped if the names are then the model's. The log lists
    tensors that are ignored or missing, which keep their values, and those in ``path`` that were not used.

    Args:
        model: only its names and shapes are used, so it may be on the meta device.
        path: a state_dict saved by ``torch.save`` (bare, or under ``model``, ``state_dict`` or
            ``model_state_dict``), a ``.safetensors`` file, a folder saved by transformers, the directory of a
            checkpoint, or that of a run, for its newest intact one.
        ignore: names of modules and tensors to leave out ("fc": fc.weight, fc.bias).

    Raises:
        UserError: unreadable; no name in common; other shapes (the first five, both shapes each); or values
            that do not fit into the model's tensor.
    """
    path, ignore = location(path), [ignore] if isinstance(ignore, str) else ignore
    state = model.state_dict(keep_vars=True).items()
    wanted = {n: tensor for n, tensor in state if isinstance(tensor, Tensor) and not is_extra_state(n)}
    found = _renamed(_read(path), wanted, getattr(model, "base_model_prefix", None))
    ignored = {name for name in wanted | found if _is_under(name, ignore)}
    if unknown := [prefix for prefix in ignore if not any(_is_under(name, [prefix]) for name in wanted)]:
        raise UserError(f"model.init_ignore names {first_five(unknown)}, which this model does not have")
    common = (wanted.keys() & found.keys()) - ignored
    if not common:
        raise UserError(
            f"model.init_from={path} has no name in common with this model: it holds "
            f"{first_five(sorted(found))}; the model {first_five(sorted(wanted))}"
        )
    different = [name for name in wanted if name in common and found[name].shape != wanted[name].shape]
    if different:
        pairs = [
            f"{name} ({list(found[name].shape)} there, {list(wanted[name].shape)} here)" for name in different
        ]
        modules = sorted({name.rpartition(".")[0] or name for name in different})
        way_out = (
            f"; model.init_ignore=[{','.join(modules)}] leaves these as initialised, as for other classes"
        )
        raise UserError(
            f"model.init_from={path} is of another model: {first_five(pairs)}{way_out * (len(modules) <= 5)}"
        )
    _refuse_loss(path, {name: (found[name], wanted[name]) for name in wanted if name in common})
    if ignored & wanted.keys():
        log.info("model.init_ignore: %s left as initialised", first_five(sorted(ignored & wanted.keys())))
    given = {id(wanted[name]) for name in common}  # a tied weight may be there under one of its names
    if missing := sorted(name for name in wanted.keys() - common - ignored if id(wanted[name]) not in given):
        log.warning("model.init_from=%s lacks %s: left as initialised", path, first_five(missing))
    if unexpected := sorted(found.keys() - common - ignored):
        log.warning("model.init_from=%s also holds %s: not used", path, first_five(unexpected))
    return {name: found[name] for name in common}


def _refuse_loss(path: Location, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Raise UserError if a tensor would lose values as it is copied; by name, those there and here."""
    first: dict[int, str] = {}
    for name, (there, here) in pairs.items():
        other = first.setdefault(id(here), name)
        if other != name and not there.equal(pairs[other][0]):
            raise UserError(
                f"model.init_from={path} has other values for {other} and {name}, which are one tensor in "
                f"this model; model.init_ignore=[{name}] takes those of {other}"
            )
        is_cut = here.dtype.is_complex < there.dtype.is_complex
        if not here.is_floating_point() and there.is_floating_point():
            is_cut = not there.equal(there.to(here.dtype).to(there.dtype))
        if is_cut:
            raise UserError(
                f"model.init_from={path} has {there.dtype} numbers for {name}, which is {here.dtype} here "
                f"and would lose a part of them; model.init_ignore=[{name}] leaves it as initialised"
            )


def _is_under(name: str, prefixes: Sequence[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _read(path: Location) -> dict[str, Tensor]:
    """The tensors in ``path`` by the names that they have there. UserError if it cannot be read."""
    if not path.exists():
        raise UserError(f"model.init_from={printable(path)} does not exist")
    try:
        if (path / SINGLE).exists():
            return _read_file(path / SINGLE)
        if (path / INDEX).exists():
            return _read_index(path)
        return _checkpoint_in(path).read("model.") if path.is_dir() else _read_file(path)
    except (UserError, Fault) as error:
        raise kind_of(error)(f"model.init_from={printable(path)}: {error}") from error


def _read_file(path: Location) -> dict[str, Tensor]:
    """The tensors of one file, of safetensors or torch."""
    with opened(path) as file:
        if path.name.endswith(".safetensors"):
            return tensors_in(file)
        if isinstance(path, Address):
            raise UserError("of single files at an address only .safetensors are read")
        return _read_torch(file)


def _read_index(folder: Location) -> dict[str, Tensor]:
    """The tensors of the files that `INDEX` names, which are beside it."""
    with opened(folder / INDEX) as file:
        index = Fields(str(folder / INDEX), read_json(folder / INDEX, file.read()))
    places = index.mapping("weight_map")
    names = sorted({places.text(name) for name in places.values})
    for name in names:
        if Path(name).name != name:
            raise UserError(
                f"{printable(folder / INDEX)} names {printable(name)}, which is not a file beside it"
            )
    files = {name: _read_file(folder / name) for name in names}
    if missing := sorted(name for name, file in places.values.items() if name not in files[file]):
        raise UserError(f"{printable(folder)} lacks {first_five(missing)}, which its {INDEX} names")
    return {name: files[file][name] for name, file in places.values.items()}


def _read_torch(file: PlainFile) -> dict[str, Tensor]:
    """What `torch.save` put into `file`, mapped from it. torch refuses what could run code."""
    path = file.descriptor_path
    try:
        loaded = torch.load(path, "cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch raises any error of its zip reader and unpickler
        words = f"{type(error).__name__}: {reason(error)}"
        raise UserError(f"torch.load(weights_only=True) refuses it: {words}") from error
    for name in _CONTAINERS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(name), Mapping):
            loaded = loaded[name]
            break
    if not isinstance(loaded, Mapping):
        raise UserError(f"it holds no named tensors, but a {type(loaded).__name__}")
    named = {k: v for k, v in loaded.items() if isinstance(k, str) and isinstance(v, Tensor)}
    if not named:
        kinds = sorted({f"{type(k).__name__}: {type(v).__name__}" for k, v in loaded.items()})
        raise UserError(f"it holds no named tensors, but {first_five(kinds) or 'nothing'}")
    if kept := sorted(k for k in loaded.keys() - named.keys() if isinstance(k, str) and is_extra_state(k)):
        log.warning("model.init_from=%s also holds %s: not used", file.path, first_five(kept))
    for name, tensor in named.items():
        if (problem := unusual(tensor)) is not None:
            raise UserError(f"{printable(name)} {problem}")
    return named


def _checkpoint_in(directory: Location) -> OpenCheckpoint:
    """The checkpoint in ``directory``, or the newest intact one if it is a run."""
    inner = directory / "checkpoints"
    listing: Listing[Any] = Listing(inner if inner.is_dir() else directory)
    found = [] if (directory / MANIFEST).exists() else listing.newest_first()
    if not found:
        return verified(directory.resolve())
    source = first_intact(found, verified, tells=True)
    log.info("model.init_from=%s: from %s", directory, source.directory.name)
    return source


def _renamed(tensors: dict[str, Tensor], wanted: Mapping[str, Tensor], base: str | None) -> dict[str, Tensor]:
    """``tensors`` by other names: those, with prefixes dropped or added, that match most names in ``wanted``.

    Any of the prefixes may be dropped, in any order. ``base`` is also added: a Hugging Face model with a head
    has the model without it as its attribute ``base``. Names in files of the first have this prefix, names in
    files of the second do not.
    """
    prefixes = (*_PREFIXES, f"{base}.") if base else _PREFIXES
    candidates = [tensors, {f"{base}.{name}": tensor for name, tensor in tensors.items()}]
    for count in range(1, len(prefixes) + 1):
        for prefix in map("".join, itertools.permutations(prefixes, count)):
            inner = {name[len(prefix) :]: name for name in tensors if name.startswith(prefix)}
            outer = {name: name for name in tensors if not name.startswith(prefix)}
            candidates.append({name: tensors[there] for name, there in (outer | inner).items()})
    return max(candidates, key=lambda renamed: len(wanted.keys() & renamed.keys()))
