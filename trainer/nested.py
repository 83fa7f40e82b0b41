"""Walks through tuples, lists and dicts within each other: batches, arguments and outputs of a model."""

import copy
from collections.abc import Callable
from operator import is_
from typing import Any

from torch.nn.utils.rnn import PackedSequence

_NESTS = (list, tuple, dict)


def leaves(value: Any) -> list[Any]:
    """What is in `value` and is itself no tuple, list or dict, in order; `value` itself if it is none."""
    if not isinstance(value, _NESTS):
        return [value]
    found: list[Any] = []
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, _NESTS):
            found += leaves(item)
        else:
            found.append(item)
    return found


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with the result of `change` in the place of each leaf; itself, if nothing changed.

    Types stay, named tuples and subclasses of dict among them. Of a PackedSequence, `change` is not given the
    batch sizes, which belong on the CPU.
    """
    if not isinstance(value, _NESTS):
        return change(value)
    if isinstance(value, PackedSequence):
        data, indices = change(value.data), (None if part is None else change(part) for part in value[2:])
        return value if data is value.data else PackedSequence(data, value.batch_sizes, *indices)
    was = value.values() if isinstance(value, dict) else value
    now = [mapped(item, change) for item in was]
    if all(map(is_, was, now)):
        return value
    if isinstance(value, tuple):
        return type(value)(*now) if hasattr(value, "_fields") else type(value)(now)
    made = copy.copy(value)
    for key, item in zip(value if isinstance(value, dict) else range(len(now)), now, strict=True):
        made[key] = item
    return made
