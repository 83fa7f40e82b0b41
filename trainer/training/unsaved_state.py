"""Attributes that modules and tasks keep between steps without saving them, so that a resume is not exact."""

import logging
import random
import zlib
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from trainer.distributed.gather_shards import as_bytes

log = logging.getLogger(__name__)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, np.generic)


class UnsavedState:
    """Compares the attributes of modules and of the task after the first two steps; warns of changed ones.

    Attributes that the first step sets and the second does not change, such as caches, are no state. A module
    with `get_extra_state` decides itself what is saved.
    """

    def __init__(self, model: nn.Module, task: Any, looks: bool) -> None:
        """One rank that `looks` is enough: the first of those that train."""
        self._model, self._task = model, task
        self._after_first: dict[str, list[Any]] | None = None
        self._is_over = not looks

    def look(self) -> None:
        """Called after each step."""
        if self._is_over:
            return
        now = _attributes(self._model) | self._of_task()
        if self._after_first is None:
            self._after_first = now
            return
        self._is_over = True
        if changed := [name for name in now if now[name] != self._after_first.get(name, now[name])]:
            log.warning(
                "%s%s changes from step to step, and no checkpoint holds it: if a step depends on the value "
                "that the one before left, a resumed run will differ; make it a buffer of the model "
                "(register_buffer), or give its module get_extra_state and set_extra_state",
                ", ".join(changed[:5]),
                f" (and {len(changed) - 5} more)" * (len(changed) > 5),
            )
        self._after_first = {}

    def _of_task(self) -> dict[str, list[Any]]:
        """The attributes of the task, but for its `plain_loss`; what is a module in it, with its tensors."""
        parts = {**getattr(self._task, "_buffers", {}), **getattr(self._task, "_modules", {})}
        return {
            f"task.{name}": _values(value, known={id(part) for part in self._model.modules()})
            for name, value in (vars(self._task) | parts).items()
            if name not in {*_OF_EVERY_MODULE, "plain_loss"}
        }


def _attributes(model: nn.Module) -> dict[str, list[Any]]:
    """Numbers, strings and tensors of each attribute, by name, if it is not a parameter, buffer or module."""
    found = {}
    known = {id(part) for part in model.modules()}
    for prefix, module in model.named_modules():
        if type(module).get_extra_state is nn.Module.get_extra_state:
            for name, value in vars(module).items():
                if name not in _OF_EVERY_MODULE:
                    found[f"{prefix}.{name}" if prefix else name] = _values(value, known)
    return found


def _values(attribute: Any, known: set[int]) -> list[Any]:
    return [_value(leaf) for leaf in tree_leaves(attribute) if id(leaf) not in known]


def _value(leaf: Any, within: bool = False) -> Any:
    """What of `leaf` can be compared; None for what the step computes, and for objects of other kinds."""
    if isinstance(leaf, Tensor):
        is_derived = leaf.requires_grad or isinstance(leaf, DTensor)
        if is_derived or leaf.is_meta or leaf.layout != torch.strided:
            return None
        return (leaf.shape, zlib.crc32(as_bytes(leaf.cpu())))
    if isinstance(leaf, np.ndarray):
        return (leaf.shape, zlib.crc32(leaf.tobytes()))
    if isinstance(leaf, torch.Generator):
        return _value(leaf.get_state())
    if isinstance(leaf, random.Random):
        return leaf.getstate()
    if isinstance(leaf, np.random.Generator):
        return repr(leaf.bit_generator.state)
    if isinstance(leaf, nn.Module):  # in a list, say, where the model does not know of it
        return [_value(tensor.detach()) for tensor in leaf.state_dict().values()]
    if isinstance(leaf, SimpleNamespace) or is_dataclass(leaf):
        return None if within else [_value(value, within=True) for value in vars(leaf).values()]
    return repr(leaf) if isinstance(leaf, _PLAIN) else None
