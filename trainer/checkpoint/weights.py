"""Load initial weights from a torch or safetensors file, a transformers folder, a checkpoint or a run."""

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

# Name parts that DistributedDataParallel, torch.compile, activation checkpointing, FSDP 1 and PEFT insert.
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "base_layer"}

Plain = tuple[str, ...]  # the parts of a name, without those that wrappers insert


class _Renaming(NamedTuple):
    """A rule that turns names in the file into names in the model: replace the prefix `saved` with `own`."""

    saved: Plain
    own: Plain


def weights_for(
    model: nn.Module,
    path: str | Location,
    ignore: str | Sequence[str] = (),
    key: str | None = None,
    freeze: Sequence[str] = (),
) -> dict[str, Tensor]:
    """Return the tensors in ``path`` for ``model``, by their names in it, without running code from the file.

    Name parts that wrappers insert are ignored. One prefix may be removed from the names in the file, such as
    ``state_dict.model`` or ``teacher.backbone``, or added, such as ``transformer``. The prefix with the most
    matching names is chosen, if at least half of the names on one side match. The log says how many tensors
    matched, which ones keep their initial values, and which ones in the file are not used.

    Args:
        model: only its names and shapes are used, so it may be on the meta device.
        path: a ``.safetensors`` file, a file of ``torch.save`` with (nested) mappings of tensors, a folder
            saved by transformers, the directory of a checkpoint, or a run directory, whose newest intact
            checkpoint is used.
        ignore: names of modules and tensors of the model to skip ("fc" skips fc.weight and fc.bias).
        key: use only tensors of the file under this prefix; None for all.
        freeze: the patterns of model.freeze.

    Raises:
        UserError: if the file cannot be read, no names match, several prefixes match equally well, shapes or
            kinds of dtype differ, the file has different values for tied weights, or a frozen parameter would
            keep its random initial values.
    """
    path, ignore = location(path), [ignore] if isinstance(ignore, str) else ignore
    state = model.state_dict(keep_vars=True).items()
    everything = {n: tensor for n, tensor in state if isinstance(tensor, Tensor) and not is_extra_state(n)}
    if unknown := [prefix for prefix in ignore if not any(_is_under(name, [prefix]) for name in everything)]:
        raise UserError(f"model.init_ignore names {first_five(unknown)}, which this model does not have")
    wanted = {name: tensor for name, tensor in everything.items() if not _is_under(name, ignore)}
    saved = _read(path)
    renaming, matches = _match(path, [name for name in saved if not is_extra_state(name)], wanted, key)
    common = {name: saved[saved_name] for name, saved_name in matches.items()}
    _refuse_different(path, {name: (tensor, wanted[name]) for name, tensor in common.items()})
    _refuse_untied(path, common, wanted)
    given = {id(wanted[name]) for name in common}  # a tied weight may be saved under one of its names
    missing = sorted(name for name, tensor in everything.items() if id(tensor) not in given)
    _refuse_frozen(path, {name: everything[name] for name in missing}, ignore, freeze)
    used = set(matches.values())
    unused = {
        name if _plain(name)[: len(renaming.saved)] == renaming.saved else name.partition(".")[0]
        for name in saved
        if name not in used
    }
    summary = f"loaded {len(everything) - len(missing)} of the model's {len(everything)} tensors"
    for names, label in (
        (".".join(renaming.saved), ", from names under "),
        (".".join(renaming.own), ", into its "),
        (first_five(missing), "; left as initialized: "),
        (first_five(sorted(unused)), "; not used: "),
    ):
        summary += label + names if names else ""
    is_expected = all(_is_under(name, ignore) for name in missing)
    log.log(logging.INFO if is_expected else logging.WARNING, "model.init_from=%s: %s", path, summary)
    return common


def _match(
    path: Location, saved_names: Collection[str], wanted: Mapping[str, Tensor], key: str | None
) -> tuple[_Renaming, dict[str, str]]:
    """Return the renaming and, for each tensor in ``wanted`` that the file contains, its name in the file."""
    own, saved = _by_plain_name(wanted), _by_plain_name(saved_names)
    if key is not None:
        saved = {plain: names for plain, names in saved.items() if _starts_with(plain, _plain(key))}
        if not saved:
            tops = sorted({name.partition(".")[0] for name in saved_names})
            raise UserError(
                f"model.init_key={key} is not in model.init_from={path}, which contains {first_five(tops)}"
            )
    counts = Counter(_renamings(own, saved))
    at_least = 1 if key is not None else min(len(own), len(saved)) / 2
    same = _Renaming((), ())
    matching = {each: count for each, count in counts.items() if count >= at_least or each == same}
    if not matching:
        raise UserError(
            f"model.init_from={path} has no names in common with this model: the file contains "
            f"{first_five(sorted(saved_names))}; the model has {first_five(sorted(wanted))}; set "
            "model.init_key=PREFIX to use the tensors under a prefix, even if only a few match"
        )
    best = [each for each, count in matching.items() if count == max(matching.values())]
    if len(best) > 1 and same not in best:
        options = [f"{'.'.join(a) or 'all names'} for {'.'.join(b) or 'the model'}" for a, b in sorted(best)]
        raise UserError(
            f"model.init_from={path} matches the model equally well in several ways: {first_five(options)}; "
            "set model.init_key to a prefix in the file, or model.init_ignore to skip a part of the model"
        )
    renaming = same if same in best else best[0]
    matches: dict[str, str] = {}
    for plain, names in own.items():
        saved_plain = renaming.saved + plain[len(renaming.own) :]
        options = saved.get(saved_plain, []) if _starts_with(plain, renaming.own) else []
        for name in names:
            same_end = [option for option in options if f".{option}".endswith(f".{name}")] or options
            if len(same_end) > 1:
                raise UserError(
                    f"model.init_from={path} has {first_five(same_end)} for {name}; set "
                    f"model.init_ignore=[{name}] to use none of them"
                )
            if same_end:
                matches[name] = same_end[0]
    return renaming, matches


def _renamings(own: Collection[Plain], saved: Collection[Plain]) -> Iterator[_Renaming]:
    """Yield, for each name on either side, the renamings that map it to a name on the other side.

    A renaming removes a prefix or adds one, which may replace the first part of a name, such as state_dict.
    """
    for plain in saved:
        yield from (_Renaming(plain[:cut], ()) for cut in range(len(plain)) if plain[cut:] in own)
    for head in {plain[:cut] for plain in saved for cut in (0, 1) if cut < len(plain)}:
        for plain in own:
            for cut in range(1, len(plain)):
                if head + plain[cut:] in saved and head[-1:] != plain[cut - 1 : cut]:
                    yield _Renaming(head, plain[:cut])


def _by_plain_name(names: Iterable[str]) -> dict[Plain, list[str]]:
    by_plain_name: dict[Plain, list[str]] = {}
    for name in names:
        by_plain_name.setdefault(_plain(name), []).append(name)
    return by_plain_name


def _plain(name: str) -> Plain:
    return tuple(part for part in name.split(".") if part not in _WRAPPERS)


def _starts_with(plain: Plain, prefix: Plain) -> bool:
    return plain[: len(prefix)] == prefix


def _refuse_different(path: Location, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Raise UserError if the tensors of a pair (saved, own) differ in shape, or if only one is quantized.

    8-bit floats, and integers in place of floats, are quantized: without their scales, they are useless.
    """

    def kind(tensor: Tensor) -> tuple[torch.Size, bool]:
        return tensor.shape, tensor.is_floating_point() and tensor.itemsize > 1

    different = {name: pair for name, pair in pairs.items() if kind(pair[0]) != kind(pair[1])}
    if different:
        tensors = first_five(
            f"{name} ({list(saved.shape)} {saved.dtype} in the file, {list(own.shape)} {own.dtype} in the "
            "model)"
            for name, (saved, own) in different.items()
        )
        modules = first_five(sorted({name.rpartition(".")[0] or name for name in different}))
        raise UserError(
            f"model.init_from={path} is from a different model: {tensors}; set model.init_ignore=[{modules}] "
            "to keep their initial values, for example after a change of the number of classes"
        )


def _refuse_untied(path: Location, common: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raise UserError if names that are tied in the model have different values in the file."""
    first: dict[int, str] = {}
    for name, saved in common.items():
        other = first.setdefault(id(wanted[name]), name)
        if other != name and not saved.equal(common[other]):
            raise UserError(
                f"model.init_from={path} has different values for {other} and {name}, which are tied in "
                f"this model; set model.init_ignore=[{name}] to use the values of {other}"
            )


def _refuse_frozen(
    path: Location, missing: Mapping[str, Tensor], ignore: Sequence[str], freeze: Sequence[str]
) -> None:
    names = [
        name
        for name, tensor in missing.items()
        if isinstance(tensor, nn.Parameter)
        and (
            any(re.search(pattern, name) for pattern in freeze)
            or (not tensor.requires_grad and not _is_under(name, ignore))
        )
    ]
    if names:
        raise UserError(
            f"{first_five(names)} would keep random values, because model.init_from={path} does not contain "
            "them and they are frozen; change model.freeze, or, if the model's code freezes them, add them "
            "to model.init_ignore"
        )


def _is_under(name: str, prefixes: Sequence[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _read(path: Location) -> dict[str, Any]:
    if not path.exists():
        raise UserError(
            f"model.init_from={printable(path)} does not exist; set the current path. A new run needs it, "
            "and so does a resumed run whose checkpoints lack frozen parameters (checkpoint.frozen=false)"
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
    with opened(path) as file:
        if path.name.endswith(".safetensors") or file.read(0, min(9, file.size))[8:] == b"{":
            return tensors_in(file)
        if isinstance(path, Address):
            raise UserError("a file that is loaded from a URL must be a .safetensors file")
        return _read_torch(file)


def _read_index(folder: Location) -> dict[str, Any]:
    with opened(folder / INDEX) as file:
        files = read_json(folder / INDEX, file.read())["weight_map"]
    tensors: dict[str, Any] = {}
    for name in sorted(set(files.values())):
        tensors |= _read_file(folder / Path(name).name)
    if missing := sorted(files.keys() - tensors.keys()):
        raise UserError(f"{printable(folder)} lacks {first_five(missing)}, which its {INDEX} lists")
    return tensors


def _read_torch(file: PlainFile) -> dict[str, Any]:
    """Return the tensors in a `file` of `torch.save`, memory-mapped, without running code from the file."""
    path = file.descriptor_path
    try:
        loaded = torch.load(path, "cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch raises any error of its zip reader and unpickler
        problem = f"{type(error).__name__}: {reason(error)}"
        if match := re.search(r"GLOBAL (\S+)", str(error)):  # such as a program's arguments
            problem = (
                f"it contains {printable(match[1])} in addition to tensors. If you trust the file, load it "
                "with weights_only=False, and save only its tensors"
            )
        raise UserError(f"torch.load(weights_only=True) failed: {problem}") from error
    if not (named := dict(_flat(loaded, "")) if isinstance(loaded, Mapping) else {}):
        raise UserError(f"the file contains a {type(loaded).__name__} without named tensors")
    return named


def _flat(mapping: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors in nested mappings by their joined keys, without those of an optimizer's state."""
    for key, value in mapping.items():
        if isinstance(key, str) and isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(key, str) and (isinstance(value, Tensor) or is_extra_state(key)):
            yield prefix + key, value


def _checkpoint_in(directory: Location) -> OpenCheckpoint:
    inner = directory / "checkpoints"
    listing: Listing[Any] = Listing(inner if inner.is_dir() else directory)
    paths = [] if (directory / MANIFEST).exists() else [each.path for each in listing.checkpoints()]
    if not paths:
        return verified(directory.resolve())
    source = first_intact(paths, Agreement())
    log.info("model.init_from=%s: using %s", directory, source.directory.name)
    return source
