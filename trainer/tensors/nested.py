"""Walks through what is nested: batches, arguments and outputs of a model.

It looks into lists, tuples, mappings (a UserDict or a BatchEncoding is one) and dataclasses. An
object with a method `to`, such as a batch of graphs, moves itself by it.
"""

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


def leaves(value: Any, within: tuple[Any, ...] = ()) -> list[Any]:
    """What is in `value` and holds nothing itself, in order; `value` itself if it is such.

    Of an object that moves itself these are its attributes'.

    Args:
        within: what holds `value`, which may hold it again.
    """
    held = _parts(value)
    if held is None and moves_itself(value):
        held = getattr(value, "__dict__", None)
    if held is None:
        return [value]
    if any(value is outer for outer in within):
        return []
    return [leaf for part in held.values() for leaf in leaves(part, (*within, value))]


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with the result of `change` in the place of each leaf; itself, if nothing changed.

    Types stay. An object that moves itself is given to `change` whole, before what it holds.
    """
    moves = moves_itself(value)
    if moves and (moved := change(value)) is not value:
        return moved
    if (was := _parts(value)) is None:
        return value if moves else change(value)
    now = {key: mapped(part, change) for key, part in was.items()}
    if all(map(is_, was.values(), now.values())):
        return value
    if isinstance(value, PackedSequence):
        now[1] = value.batch_sizes  # which belong on the CPU
    if isinstance(value, tuple):
        return type(value)(*now.values()) if hasattr(value, "_fields") else type(value)(now.values())
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)(now)  # type: ignore[call-arg]
    made = copy.copy(value)
    for key, item in now.items():
        if isinstance(value, list | Mapping):
            made[key] = item
        else:
            object.__setattr__(made, key, item)  # of a dataclass, which may be frozen
    return made


def moves_itself(value: Any) -> bool:
    return not isinstance(value, Tensor | nn.Module) and callable(getattr(type(value), "to", None))


def _parts(value: Any) -> dict[Any, Any] | None:
    """What `value` holds, by index, key or field; None if it is nothing that is looked into."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
    return None
