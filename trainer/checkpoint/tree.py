"""Nested state taken apart into flat named tensors and JSON, and put together again.

Nothing but tensors goes into tensor files, and nothing but JSON beside them: no reader ever needs a pickle.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.errors import UserError


def take_apart(tree: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of ``tree`` by their dotted paths, and the rest, fit for JSON.

    A tensor, a tuple, a dict with other keys than strings and so on become ``{"$kind": ...}``.
    Raises UserError for a value that has no such form.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, {key: _take_apart(value, key, tensors) for key, value in tree.items()}


def _take_apart(tree: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if isinstance(tree, Tensor):
        tensors[prefix] = tree
        return {"$tensor": prefix}
    if isinstance(tree, list | tuple):
        items = [_take_apart(item, f"{prefix}.{i}", tensors) for i, item in enumerate(tree)]
        return items if isinstance(tree, list) else {"$tuple": items}
    if isinstance(tree, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in tree):
            return {key: _take_apart(value, f"{prefix}.{key}", tensors) for key, value in tree.items()}
        pairs = [
            [_take_apart(key, prefix, tensors), _take_apart(value, f"{prefix}.{key}", tensors)]
            for key, value in tree.items()
        ]
        return {"$counter" if isinstance(tree, Counter) else "$dict": pairs}
    if isinstance(tree, torch.dtype):
        return {"$dtype": str(tree).removeprefix("torch.")}
    if hasattr(tree, "item") and getattr(tree, "shape", None) == ():  # a NumPy scalar
        return _take_apart(tree.item(), prefix, tensors)
    raise UserError(
        f"a checkpoint cannot hold {prefix}, a {type(tree).__name__}: only tensors and plain values"
    )


def put_together(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that ``take_apart`` was given."""
    if isinstance(plain, list):
        return [put_together(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    kind = next(iter(plain), "")
    if len(plain) != 1 or not kind.startswith("$"):
        return {key: put_together(value, tensors) for key, value in plain.items()}
    value = plain[kind]
    match kind:
        case "$tensor":
            return tensors[value]
        case "$tuple":
            return tuple(put_together(item, tensors) for item in value)
        case "$dict":
            return {put_together(k, tensors): put_together(v, tensors) for k, v in value}
        case "$counter":
            return Counter({put_together(k, tensors): put_together(v, tensors) for k, v in value})
        case "$dtype":
            dtype = getattr(torch, value, None)
            if isinstance(dtype, torch.dtype):
                return dtype
    raise UserError(f"this checkpoint holds a value of the unknown kind {kind!r}: {value!r}")
