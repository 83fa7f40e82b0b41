"""What modules, tasks and optimizers keep in attributes without saving it, so that a resume is not exact."""

import functools
import io
import logging
import pickle
import random
import sys
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.errors import first_few
from trainer.optim.attributes import is_plain, optimizers_in, own_attributes
from trainer.tensors.bits import as_bytes
from trainer.tensors.local_shard import to_local

log = logging.getLogger(__name__)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_CONTAINERS = (Mapping, list, tuple, deque, set, frozenset)
# Which pickle writes by itself.
_PLAIN: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes, np.generic, np.ndarray)
_PLAIN += (random.Random, np.random.Generator, np.random.BitGenerator, np.random.RandomState)
_NOT_WALKED = sys.stdlib_module_names | {"torch", "numpy", "trainer"}  # loggers, threads, streams, hooks
_MAX_ELEMENTS = 10_000  # of a container that is looked into
_MAX_HASHED = 2**20  # elements of a tensor; of a larger one at least half as many, evenly spread
_WAY_OUT = (
    "Make it a buffer of the model (register_buffer), or give its module get_extra_state and "
    "set_extra_state; an optimizer should keep it in its state, or as numbers and small tensors in attributes"
)

Fingerprint = tuple[int, int]
"""The size and a checksum of what an attribute holds."""


class UnsavedState:
    """Compares attributes of modules, task and optimizer that no checkpoint contains.

    It looks at the start, after the dry run, after the first two steps and at each save, and warns of what
    has changed since the look before. Except in the second step, a new attribute or one of another size does
    not count, because a cache is not state. At a resume it warns of each attribute that has another value
    than at the save.

    A module with `get_extra_state`, and an optimizer with its own `state_dict`, decide themselves what is
    saved; not one of several, which are saved as one. Plain attributes of an optimizer are saved.

    Args:
        model: unwrapped.
        optimizer: may be replaced by another.
        looks: whether this rank compares; one is enough, the first of those that train.
    """

    def __init__(self, model: nn.Module, task: Any, optimizer: Optimizer, looks: bool) -> None:
        self._model, self._task, self.optimizer, self._looks = model, task, optimizer, looks
        self._num_steps = 0
        self._warned: set[str] = set()
        self._left_out = {*_OF_EVERY_MODULE, "plain_loss"}  # `Task.loss` sets the latter for the log
        self._first = self._before = dict(self._attributes()) if looks else {}

    def leave_out(self, names: Iterable[str]) -> None:
        """Attributes of the task that each step sets again."""
        self._left_out.update(names)

    def start(self, saved: Mapping[str, Sequence[int]]) -> None:
        """Called after the dry run, with what `look_at_save` returned for the checkpoint resumed from."""
        if not self._looks:
            return
        self._before = dict(self._attributes())
        if lost := [name for name, then in saved.items() if self._before.get(name) != tuple(then)]:
            log.warning(
                "%s had another value when the checkpoint was saved, and no checkpoint contains it: if a "
                "step depends on its value, this run will differ from an uninterrupted one. %s",
                first_few(lost),
                _WAY_OUT,
            )

    def look(self) -> None:
        """Called after each step."""
        self._num_steps += 1
        if self._looks and self._num_steps <= 2:
            self._compare(by_one_step=self._num_steps == 2)

    def look_at_save(self) -> dict[str, Fingerprint]:
        """Called before each save. Returns the fingerprints of what has changed since the start."""
        if not self._looks:
            return {}
        self._compare(by_one_step=False)
        return {name: now for name, now in self._before.items() if now and now != self._first.get(name)}

    def _compare(self, by_one_step: bool) -> None:
        found, changed = dict(self._attributes()), []
        for name, now in found.items():
            before = self._before.get(name)
            if now is None or before is None or now == before or name in self._warned:
                continue
            if by_one_step or now[0] == before[0]:
                changed.append(name)
        self._before = found
        self._warned.update(changed)
        if changed:
            log.warning(
                "%s changes during training, and no checkpoint contains it: if a step depends on its "
                "value, a resumed run will differ from an uninterrupted one. %s",
                first_few(changed),
                _WAY_OUT,
            )

    def _attributes(self) -> Iterator[tuple[str, Fingerprint | None]]:
        """The fingerprint of each attribute, by name, without the model's parameters, buffers and modules."""
        model, task = self._model, self._task
        known = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
        for prefix, module in model.named_modules():
            if type(module).get_extra_state is nn.Module.get_extra_state:
                for name, value in vars(module).items():
                    if name not in _OF_EVERY_MODULE:
                        yield f"{prefix}.{name}" if prefix else name, fingerprint(value, known)
        # A task may be a module, but no checkpoint holds its buffers and modules.
        parts = {**getattr(task, "_buffers", {}), **getattr(task, "_modules", {})}
        for name, value in (vars(task) | parts).items():
            if name not in self._left_out:
                yield f"task.{name}", fingerprint(value, known)
        if type(self.optimizer).state_dict is not Optimizer.state_dict:
            return
        optimizers = optimizers_in(self.optimizer)
        known |= set(map(id, optimizers))  # torch binds methods to them
        for part, path in optimizers.items():
            for name, value in own_attributes(part).items():
                if not is_plain(value):
                    yield f"{path}.{name}", fingerprint(value, known)


def fingerprint(value: Any, known: Collection[int]) -> Fingerprint | None:
    """The size and a checksum of all in `value` that can be compared; None if it cannot be looked at.

    Args:
        known: ids of objects to leave out, with all that they hold.
    """
    file = io.BytesIO()
    try:
        _Walk(file, known).dump(value)
    except Exception:  # whatever the user's object does when it is looked at
        return None
    return file.tell(), zlib.crc32(file.getbuffer())


class _Walk(pickle.Pickler):
    """Walks through containers, modules, optimizers and users' objects; its file is never read.

    Of a tensor it writes its shape and a checksum, for a DTensor of its shard; of a class, a function or an
    object of a library the type alone.
    """

    def __init__(self, file: io.BytesIO, known: Collection[int]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_id(self, item: Any) -> Any:
        """What is written in place of `item`; None: what it holds."""
        if id(item) in self._known:
            return "known"
        if isinstance(item, Tensor):
            return _of_tensor(item)
        if isinstance(item, torch.Generator):
            return _of_tensor(item.get_state())
        if isinstance(item, _CONTAINERS):
            return None if len(item) <= _MAX_ELEMENTS else str(len(item))
        return None if isinstance(item, _PLAIN) or _is_looked_into(item) else type(item).__name__

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, nn.Module | Optimizer):
            return dict, (item.state_dict(),)
        is_plain = isinstance(item, (*_PLAIN, *_CONTAINERS)) or not _is_looked_into(item)
        return NotImplemented if is_plain else (dict, (getattr(item, "__dict__", {}),))


def _is_looked_into(item: Any) -> bool:
    is_part = isinstance(item, nn.Module | Optimizer)
    return is_part or (not isinstance(item, type) and _is_users(type(item).__module__.partition(".")[0]))


def _of_tensor(tensor: Tensor) -> tuple[str, bytes] | str:
    # Computed by the step, or maybe a parameter that the optimizer updates.
    if tensor.requires_grad and (not tensor.is_leaf or isinstance(tensor, nn.Parameter)):
        return "computed"
    flat = to_local(tensor).reshape(-1)
    flat = flat[:: 1 + flat.numel() // _MAX_HASHED].cpu()
    return str(tuple(tensor.shape)), zlib.crc32(as_bytes(flat)).to_bytes(4)


@functools.cache
def _is_users(package: str) -> bool:
    """Whether a class is of a user's own code, and not of a library, whose objects may be large."""
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    is_installed = {"site-packages", "dist-packages"} & {*Path(file).parts}
    return package not in _NOT_WALKED and not is_installed
