"""Nested state taken apart into flat named tensors and JSON, and put together again.

Tensor files hold only tensors, and the other files only JSON: no reader needs a pickle.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.errors import UserError
from trainer.tensors.local_shard import tensors_within

WITHIN = "$"  # begins the last part of the path of a tensor within another


def take_apart(tree: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of ``tree`` by their dotted paths, and the rest, fit for JSON.

    What JSON lacks becomes a dict of one key: ``$tensor`` with the path of a tensor (and
    ``stride``, if an optimizer keeps it in another order than by rows), ``$bytes`` with such a
    ``$tensor``, ``$tuple``, ``$dict`` (pairs, if a key is not a string), ``$counter``, ``$dtype`` or
    ``$tensors``, for one that is several: its class, those, and what its class needs to make it of them.

    Raises:
        UserError: a value has no such form, or two tensors have one path.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, {key: _take_apart(value, key, tensors) for key, value in tree.items()}


def _take_apart(tree: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if isinstance(tree, Tensor) and (within := tensors_within(tree)):
        parts = {key: _take_apart(part, f"{prefix}.{WITHIN}{key}", tensors) for key, part in within.items()}
        needs = [tree.__tensor_flatten__()[1], tuple(tree.shape), tree.stride()]  # type: ignore[attr-defined]
        return {"$tensors": [torch.typename(type(tree)), parts, *_take_apart(needs, prefix, tensors)]}
    if isinstance(tree, Tensor):
        # torch.save would also write the user's attributes, which no reader needs.
        kept: dict[str, Any] = _keep(tree.detach() if type(tree) is Tensor else tree, prefix, tensors)
        if prefix.startswith("optimizer.state.") and type(tree) is Tensor and not tree.is_contiguous():
            # SOAP's eigenvectors come column by column: products with a copy in rows round differently.
            kept["stride"] = torch.empty_like(tree).stride()
        return kept
    if isinstance(tree, list | tuple) and not hasattr(tree, "_fields"):  # a named tuple loses its names
        items = [_take_apart(item, f"{prefix}.{i}", tensors) for i, item in enumerate(tree)]
        return items if isinstance(tree, list) else {"$tuple": items}
    if isinstance(tree, Mapping) and not isinstance(tree, defaultdict):  # which loses its default
        is_counter = isinstance(tree, Counter)
        if not is_counter and all(isinstance(key, str) and not key.startswith("$") for key in tree):
            return {key: _take_apart(value, f"{prefix}.{key}", tensors) for key, value in tree.items()}
        pairs = [
            [_take_apart(key, prefix, tensors), _take_apart(value, f"{prefix}.{key}", tensors)]
            for key, value in tree.items()
        ]
        return {"$counter" if is_counter else "$dict": pairs}
    if isinstance(tree, bytes | bytearray):  # of any size, unlike text
        # With a byte more: torch.frombuffer refuses an empty buffer.
        data = torch.frombuffer(bytearray(tree) + b"\0", dtype=torch.uint8)[:-1].clone()
        return {"$bytes": _keep(data, prefix, tensors)}
    if isinstance(tree, torch.dtype):
        return {"$dtype": str(tree).removeprefix("torch.")}
    if hasattr(tree, "item") and getattr(tree, "shape", None) == ():  # a NumPy scalar
        value = tree.item()
        if isinstance(value, bool | int | float):  # of a long double it is not a plain number
            return value
    raise UserError(
        f"a checkpoint cannot hold {prefix}, a {type(tree).__name__}: only tensors and plain values"
    )


def _keep(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Add ``tensor`` to ``tensors``, and return what stands for it in JSON."""
    if path in tensors:
        raise UserError(
            f"a checkpoint cannot hold two tensors at {path}: keys of its dicts make one path, such as "
            '"a.b" beside {"a": {"b": ...}}, or 1 beside "1"; name them apart'
        )
    tensors[path] = tensor
    return {"$tensor": path}


def put_together(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of ``take_apart``; ``plain`` may be a branch of a tree."""
    if isinstance(plain, list):
        return [put_together(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    value: Any
    kind, value = next(iter(plain.items()), ("", ""))
    match kind:
        case "$tensor":
            found, stride = tensors[value], plain.get("stride")
            return found.new_empty_strided(found.shape, stride).copy_(found) if stride else found
        case "$tuple":
            return tuple(put_together(value, tensors))
        case "$dict":
            return dict(put_together(value, tensors))
        case "$counter":
            return Counter(dict(put_together(value, tensors)))
        case "$bytes":
            return put_together(value, tensors).numpy().tobytes()
        case "$dtype":
            return getattr(torch, value)
        case "$tensors":
            return _class_of(value[0]).__tensor_unflatten__(*put_together(value[1:], tensors))
    return {key: put_together(item, tensors) for key, item in plain.items()}


def _class_of(full_name: str) -> Any:
    """The class of tensors of that name, if this program has imported it: no name in a file is imported."""
    kinds: list[type] = [Tensor]
    for kind in kinds:  # which grows
        if torch.typename(kind) == full_name and hasattr(kind, "__tensor_unflatten__"):
            return kind
        kinds += kind.__subclasses__()
    raise UserError(f"the checkpoint's optimizer keeps a {full_name}, unlike this one; set optim as it was")


def is_extra_state(name: str) -> bool:
    """Whether the tensor is from ``get_extra_state`` of a module, and may have any shape and dtype."""
    return "_extra_state" in name.split(".")
