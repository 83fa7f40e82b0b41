"""Traverse nested structures, such as batches and the arguments and outputs of a model.

Lists, tuples, mappings (including UserDict and BatchEncoding) and dataclasses are traversed. An object with a
method `to`, such as a batch of graphs, moves itself to a device.
"""

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


def leaves(value: Any, within: tuple[Any, ...] = ()) -> list[Any]:
    """Return the leaves of `value` in order; [value] if it is a leaf.

    The leaves of an object that moves itself are those of its attributes. Containers may contain each other;
    `within` contains the containers around `value`.
    """
    parts = _parts(value)
    if parts is None and moves_itself(value):
        parts = getattr(value, "__dict__", None)
    if parts is None:
        return [value]
    if any(value is outer for outer in within):
        return []
    return [leaf for part in parts.values() for leaf in leaves(part, (*within, value))]


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `value` with each leaf replaced by the result of `change`; `value` itself if nothing changed.

    Containers keep their types. An object that moves itself is passed to `change` before its contents.
    """
    moves = moves_itself(value)
    if moves and (moved := change(value)) is not value:
        return moved
    if (old_parts := _parts(value)) is None:
        return value if moves else change(value)
    parts = {key: mapped(part, change) for key, part in old_parts.items()}
    if all(map(is_, old_parts.values(), parts.values())):
        return value
    if isinstance(value, PackedSequence):
        parts[1] = value.batch_sizes  # these must stay on the CPU
    if isinstance(value, tuple):
        return type(value)(*parts.values()) if hasattr(value, "_fields") else type(value)(parts.values())
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)(parts)  # type: ignore[call-arg]
    result = copy.copy(value)
    for key, item in parts.items():
        if isinstance(value, list | Mapping):
            result[key] = item
        else:
            object.__setattr__(result, key, item)  # a dataclass may be frozen
    return result


def moves_itself(value: Any) -> bool:
    return not isinstance(value, Tensor | nn.Module) and callable(getattr(type(value), "to", None))


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return the contents of a container by index, key or field; None if `value` is not traversed."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
    return None
