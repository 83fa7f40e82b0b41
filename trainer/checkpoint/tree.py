"""Split nested state into named tensors and JSON, and put it together again.

All files contain only tensors or only JSON, so no reader needs pickle.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.errors import UserError
from trainer.tensors.local_shard import inner_tensors

INNER = "$"  # the first character of the last part of an inner tensor's path


def take_apart(tree: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of ``tree`` by their dotted paths, and everything else as JSON values.

    Values that JSON cannot represent become a dict with one key: ``$tensor`` with the path of a tensor (and
    ``stride`` if an optimizer's tensor is not row-major), ``$bytes`` with such a ``$tensor``, ``$tuple``,
    ``$dict`` (pairs, if a key is not a string), ``$counter``, ``$dtype``, or ``$tensors`` for a tensor
    subclass: its class, its inner tensors, and the context that the class needs to restore it.

    Raises:
        UserError: if a value cannot be represented, or two tensors have the same path.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, {key: _take_apart(value, key, tensors) for key, value in tree.items()}


def _take_apart(tree: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if isinstance(tree, Tensor) and (within := inner_tensors(tree)):
        parts = {key: _take_apart(part, f"{prefix}.{INNER}{key}", tensors) for key, part in within.items()}
        context = [tree.__tensor_flatten__()[1], tuple(tree.shape), tree.stride()]  # type: ignore[attr-defined]
        return {"$tensors": [torch.typename(type(tree)), parts, *_take_apart(context, prefix, tensors)]}
    if isinstance(tree, Tensor):
        reference: dict[str, Any] = _add(tree.detach() if type(tree) is Tensor else tree, prefix, tensors)
        if prefix.startswith("optimizer.state.") and type(tree) is Tensor and not tree.is_contiguous():
            # SOAP's eigenvectors are column-major; products with a row-major copy round differently.
            reference["stride"] = torch.empty_like(tree).stride()
        return reference
    if isinstance(tree, list | tuple) and not hasattr(tree, "_fields"):  # a named tuple would lose its names
        items = [_take_apart(item, f"{prefix}.{i}", tensors) for i, item in enumerate(tree)]
        return items if isinstance(tree, list) else {"$tuple": items}
    if isinstance(tree, Mapping) and not isinstance(tree, defaultdict):  # it would lose its default_factory
        is_counter = isinstance(tree, Counter)
        if not is_counter and all(isinstance(key, str) and not key.startswith("$") for key in tree):
            return {key: _take_apart(value, f"{prefix}.{key}", tensors) for key, value in tree.items()}
        pairs = [
            [_take_apart(key, prefix, tensors), _take_apart(value, f"{prefix}.{key}", tensors)]
            for key, value in tree.items()
        ]
        return {"$counter" if is_counter else "$dict": pairs}
    if isinstance(tree, bytes | bytearray):  # as a tensor, because they may be large
        # One byte is added because torch.frombuffer does not accept an empty buffer.
        data = torch.frombuffer(bytearray(tree) + b"\0", dtype=torch.uint8)[:-1].clone()
        return {"$bytes": _add(data, prefix, tensors)}
    if isinstance(tree, torch.dtype):
        return {"$dtype": str(tree).removeprefix("torch.")}
    if hasattr(tree, "item") and getattr(tree, "shape", None) == ():  # a NumPy scalar
        value = tree.item()
        if isinstance(value, bool | int | float):  # for a long double, item() does not return a float
            return value
    raise UserError(
        f"{prefix} cannot be saved, because it is a {type(tree).__name__}; checkpoints can contain tensors, "
        "numbers, strings, bytes, None, dtypes, and lists, tuples and dicts of these"
    )


def _add(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> dict[str, str]:
    if path in tensors:
        raise UserError(
            f"two tensors cannot be saved at the same path {path}: keys of nested dicts are joined by dots, "
            'so "a.b" collides with {"a": {"b": ...}}, and 1 with "1"; rename a key'
        )
    tensors[path] = tensor
    return {"$tensor": path}


def put_together(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the tree that ``take_apart`` split; ``plain`` may be a subtree."""
    if isinstance(plain, list):
        return [put_together(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    value: Any
    kind, value = next(iter(plain.items()), ("", ""))
    match kind:
        case "$tensor":
            tensor, stride = tensors[value], plain.get("stride")
            return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor) if stride else tensor
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
    """Return the imported tensor subclass with this name; import nothing, because files are not trusted."""
    kinds: list[type] = [Tensor]
    for kind in kinds:  # grows during the loop
        if torch.typename(kind) == full_name and hasattr(kind, "__tensor_unflatten__"):
            return kind
        kinds += kind.__subclasses__()
    raise UserError(
        f"the checkpoint contains optimizer state of type {full_name}, which this run's optimizer does not "
        "use; set optim as in the checkpoint"
    )


def is_extra_state(name: str) -> bool:
    """Return whether the tensor comes from a module's ``get_extra_state``; its shape and dtype may change."""
    return "_extra_state" in name.split(".")
