"""Weights from elsewhere: files of torch or safetensors, a folder of transformers, a checkpoint or a run."""

import logging
import re
import zipfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.checkpoint.listing import Listing
from trainer.checkpoint.manifest import MANIFEST
from trainer.checkpoint.open_checkpoint import OpenCheckpoint, first_intact, verified
from trainer.checkpoint.reading import PlainFile, opened
from trainer.checkpoint.safetensors_files import INDEX, SINGLE, tensors_in
from trainer.checkpoint.tree import is_extra_state
from trainer.distributed.agreement import Agreement
from trainer.errors import RetryableError, UserError, kind_of
from trainer.files.address import Address, Location, location
from trainer.files.untrusted import first_five, printable, read_json, reason

log = logging.getLogger(__name__)

# What DistributedDataParallel, torch.compile, activation checkpointing, FSDP 1 and PEFT put into names.
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "base_layer"}

Plain = tuple[str, ...]  # the parts of a name, without those of wrappers


class _Shift(NamedTuple):
    """A tensor of the model is in the file under the same plain name with `there` in place of `here`."""

    there: Plain
    here: Plain


def weights_for(
    model: nn.Module,
    path: str | Location,
    ignore: str | Sequence[str] = (),
    key: str | None = None,
    freeze: Sequence[str] = (),
) -> dict[str, Tensor]:
    """The tensors in ``path`` for those of the same names in ``model``; never runs code from the file.

    Wrappers count on neither side, anywhere in a name. One prefix may be dropped, as ``state_dict.model`` or
    ``teacher.backbone``, or added, as ``transformer``: the one with which most names are the model's, if that
    is half of those on one side. The log says what was found, what was left and what was not used.

    Args:
        model: only its names and shapes are used, so it may be on the meta device.
        path: a ``.safetensors`` file, or one of ``torch.save`` with mappings of tensors, nested or not; a
            folder saved by transformers; the directory of a checkpoint, or of a run: its newest intact one.
        ignore: names of modules and tensors to leave out ("fc": fc.weight, fc.bias).
        key: of the file's tensors only those under this prefix.
        freeze: model.freeze.

    Raises:
        UserError: unreadable; no name in common, or several prefixes with equally many; other shapes or kinds
            of number (the first five, both each); other values for names that are tied here; or a parameter
            that is frozen would stay as initialised.
    """
    path, ignore = location(path), [ignore] if isinstance(ignore, str) else ignore
    state = model.state_dict(keep_vars=True).items()
    everything = {n: tensor for n, tensor in state if isinstance(tensor, Tensor) and not is_extra_state(n)}
    if unknown := [prefix for prefix in ignore if not any(_is_under(name, [prefix]) for name in everything)]:
        raise UserError(f"model.init_ignore names {first_five(unknown)}, which this model does not have")
    wanted = {name: tensor for name, tensor in everything.items() if not _is_under(name, ignore)}
    found = _read(path)
    shift, places = _matched(path, [name for name in found if not is_extra_state(name)], wanted, key)
    common = {name: found[place] for name, place in places.items()}
    _refuse_others(path, {name: (there, wanted[name]) for name, there in common.items()})
    _refuse_untied(path, common, wanted)
    given = {id(wanted[name]) for name in common}  # a tied weight may be there under one of its names
    missing = sorted(name for name, tensor in everything.items() if id(tensor) not in given)
    _refuse_frozen(path, {name: everything[name] for name in missing}, ignore, freeze)
    used = set(places.values())
    unused = {
        name if _plain(name)[: len(shift.there)] == shift.there else name.partition(".")[0]
        for name in found
        if name not in used
    }
    words = f"{len(everything) - len(missing)} of the model's {len(everything)} tensors"
    for named, told in (
        (".".join(shift.there), ", under "),
        (".".join(shift.here), ", for its "),
        (first_five(missing), "; left as initialised: "),
        (first_five(sorted(unused)), "; not used: "),
    ):
        words += told + named if named else ""
    is_asked = all(_is_under(name, ignore) for name in missing)
    log.log(logging.INFO if is_asked else logging.WARNING, "model.init_from=%s: %s", path, words)
    return common


def _matched(
    path: Location, found: Collection[str], wanted: Mapping[str, Tensor], key: str | None
) -> tuple[_Shift, dict[str, str]]:
    """How names differ, and by name of ``wanted`` its name in ``found``, if it is there."""
    ours, theirs = _by_plain_name(wanted), _by_plain_name(found)
    if key is not None:
        theirs = {plain: names for plain, names in theirs.items() if _begins(plain, _plain(key))}
        if not theirs:
            tops = sorted({name.partition(".")[0] for name in found})
            raise UserError(
                f"model.init_key={key} is not in model.init_from={path}: it has {first_five(tops)}"
            )
    counts = Counter(_shifts(ours, theirs))
    at_least = 1 if key is not None else min(len(ours), len(theirs)) / 2
    same = _Shift((), ())
    fit = {shift: count for shift, count in counts.items() if count >= at_least or shift == same}
    if not fit:
        raise UserError(
            f"model.init_from={path} has no name in common with this model: it holds "
            f"{first_five(sorted(found))}; the model {first_five(sorted(wanted))}; model.init_key=PREFIX "
            "takes what is under a prefix, however little"
        )
    best = [shift for shift, count in fit.items() if count == max(fit.values())]
    if len(best) > 1 and same not in best:
        ways = [f"its {'.'.join(a) or 'names'} for {'.'.join(b) or 'the model'}" for a, b in sorted(best)]
        raise UserError(
            f"model.init_from={path} fits equally in several ways: {first_five(ways)}; model.init_key takes "
            "one prefix of the file, model.init_ignore leaves out a part of the model"
        )
    shift = same if same in best else best[0]
    places: dict[str, str] = {}
    for plain, names in ours.items():
        options = theirs.get(shift.there + plain[len(shift.here) :], []) if _begins(plain, shift.here) else []
        for name in names:
            fitting = [option for option in options if f".{option}".endswith(f".{name}")] or options
            if len(fitting) > 1:
                way_out = f"model.init_ignore=[{name}] takes none"
                raise UserError(f"model.init_from={path} has {first_five(fitting)} for {name}; {way_out}")
            if fitting:
                places[name] = fitting[0]
    return shift, places


def _shifts(ours: Collection[Plain], theirs: Collection[Plain]) -> Iterator[_Shift]:
    """For each name of either side, the shifts by which it is the other's.

    A prefix is dropped, or one is added, perhaps in place of the first part: state_dict, for instance.
    """
    for plain in theirs:
        yield from (_Shift(plain[:cut], ()) for cut in range(len(plain)) if plain[cut:] in ours)
    for head in {plain[:cut] for plain in theirs for cut in (0, 1) if cut < len(plain)}:
        for plain in ours:
            for cut in range(1, len(plain)):
                if head + plain[cut:] in theirs and head[-1:] != plain[cut - 1 : cut]:
                    yield _Shift(head, plain[:cut])


def _by_plain_name(names: Iterable[str]) -> dict[Plain, list[str]]:
    found: dict[Plain, list[str]] = {}
    for name in names:
        found.setdefault(_plain(name), []).append(name)
    return found


def _plain(name: str) -> Plain:
    return tuple(part for part in name.split(".") if part not in _WRAPPERS)


def _begins(plain: Plain, prefix: Plain) -> bool:
    return plain[: len(prefix)] == prefix


def _refuse_others(path: Location, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Raise UserError if shapes or kinds of number differ; by name, the tensors there and here.

    Floats of 8 bits and integers in place of floats are quantized: without their scales they mean nothing.
    """

    def kind(tensor: Tensor) -> tuple[torch.Size, bool]:
        return tensor.shape, tensor.is_floating_point() and tensor.itemsize > 1

    different = {name: pair for name, pair in pairs.items() if kind(pair[0]) != kind(pair[1])}
    if different:
        words = first_five(
            f"{name} ({list(there.shape)} {there.dtype} there, {list(here.shape)} {here.dtype} here)"
            for name, (there, here) in different.items()
        )
        modules = first_five(sorted({name.rpartition(".")[0] or name for name in different}))
        raise UserError(
            f"model.init_from={path} is of another model: {words}; model.init_ignore=[{modules}] leaves "
            "these as initialised, as for other classes"
        )


def _refuse_untied(path: Location, common: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raise UserError if names that are one tensor in this model have other values in the file."""
    first: dict[int, str] = {}
    for name, there in common.items():
        other = first.setdefault(id(wanted[name]), name)
        if other != name and not there.equal(common[other]):
            raise UserError(
                f"model.init_from={path} has other values for {other} and {name}, which are one tensor in "
                f"this model; model.init_ignore=[{name}] takes those of {other}"
            )


def _refuse_frozen(
    path: Location, left: Mapping[str, Tensor], ignore: Sequence[str], freeze: Sequence[str]
) -> None:
    """Raise UserError if a parameter that is left as initialised is never trained."""
    names = [
        name
        for name, tensor in left.items()
        if isinstance(tensor, nn.Parameter)
        and (
            any(re.search(pattern, name) for pattern in freeze)
            or (not tensor.requires_grad and not _is_under(name, ignore))
        )
    ]
    if names:
        raise UserError(
            f"{first_five(names)} would keep random values: frozen, and not taken from "
            f"model.init_from={path}; let model.freeze match less, or, of what the model itself freezes, "
            "name it in model.init_ignore"
        )


def _is_under(name: str, prefixes: Sequence[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _read(path: Location) -> dict[str, Any]:
    """The tensors and extra state in ``path``, by their names there. UserError if it cannot be read."""
    if not path.exists():
        raise UserError(
            f"model.init_from={printable(path)} does not exist; give its current path. A new run needs "
            "it, and so does a resumed one if checkpoint.frozen=false left frozen parameters out"
        )
    try:
        if (path / SINGLE).exists():
            return _read_file(path / SINGLE)
        if (path / INDEX).exists():
            return _read_index(path)
        return _checkpoint_in(path).model_state() if path.is_dir() else _read_file(path)
    except (UserError, RetryableError) as error:
        raise kind_of(error)(f"model.init_from={printable(path)}: {error}") from error


def _read_file(path: Location) -> dict[str, Any]:
    """The tensors of one file, of safetensors or torch."""
    with opened(path) as file:
        if path.name.endswith(".safetensors") or file.read(0, min(9, file.size))[8:] == b"{":
            return tensors_in(file)
        if isinstance(path, Address):
            raise UserError("of single files at an address only .safetensors are read")
        return _read_torch(file)


def _read_index(folder: Location) -> dict[str, Any]:
    """The tensors of the files that `INDEX` names, which are beside it."""
    with opened(folder / INDEX) as file:
        places = read_json(folder / INDEX, file.read())["weight_map"]
    found: dict[str, Any] = {}
    for name in sorted(set(places.values())):
        found |= _read_file(folder / Path(name).name)
    if missing := sorted(places.keys() - found.keys()):
        raise UserError(f"{printable(folder)} lacks {first_five(missing)}, which its {INDEX} names")
    return found


def _read_torch(file: PlainFile) -> dict[str, Any]:
    """What `torch.save` put into `file`, mapped from it. torch refuses what could run code."""
    path = file.descriptor_path
    try:
        loaded = torch.load(path, "cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch raises any error of its zip reader and unpickler
        words = f"{type(error).__name__}: {reason(error)}"
        if found := re.search(r"GLOBAL (\S+)", str(error)):  # of a program's arguments, say
            words = f"it holds {printable(found[1])} beside tensors. If you trust it, load it with "
            words += "weights_only=False, and save its tensors alone"
        raise UserError(f"torch.load(weights_only=True) refuses it: {words}") from error
    if not (named := dict(_flat(loaded, "")) if isinstance(loaded, Mapping) else {}):
        raise UserError(f"it is a {type(loaded).__name__} without named tensors")
    return named


def _flat(mapping: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """The tensors in nested mappings by their keys, with dots between, without what optimizers number."""
    for key, value in mapping.items():
        if isinstance(key, str) and isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(key, str) and (isinstance(value, Tensor) or is_extra_state(key)):
            yield prefix + key, value


def _checkpoint_in(directory: Location) -> OpenCheckpoint:
    """The checkpoint in ``directory``, or the newest intact one if it is a run."""
    inner = directory / "checkpoints"
    listing: Listing[Any] = Listing(inner if inner.is_dir() else directory)
    found = [] if (directory / MANIFEST).exists() else [each.path for each in listing.found()]
    if not found:
        return verified(directory.resolve())
    source = first_intact(found, Agreement())
    log.info("model.init_from=%s: from %s", directory, source.directory.name)
    return source
