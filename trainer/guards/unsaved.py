"""Detect attributes of modules, tasks and optimizers that change but are not saved in checkpoints."""

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
# Types that pickle serializes completely.
_PLAIN: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes, np.generic, np.ndarray)
_PLAIN += (random.Random, np.random.Generator, np.random.BitGenerator, np.random.RandomState)
_NOT_TRAVERSED = sys.stdlib_module_names | {"torch", "numpy", "trainer"}  # loggers, threads, streams, hooks
_MAX_ELEMENTS = 10_000  # for larger containers, only the length is compared
_MAX_HASHED = 2**20  # elements; larger tensors are sampled evenly, with at least half as many elements
_WAY_OUT = (
    "Make them buffers of the model (register_buffer), or define get_extra_state and set_extra_state in "
    "their module; an optimizer should keep them in its state, or as numbers and small tensors in attributes"
)

Fingerprint = tuple[int, int]
"""The size and a checksum of an attribute's value."""


class UnsavedState:
    """Warns about changing attributes of modules, task and optimizer that checkpoints do not contain.

    Attributes are compared after the dry run, after each of the first two steps and at each save. A warning
    names those that have changed since the previous comparison. Except in the second step, new attributes and
    changes of size are ignored, because they may be caches. After a resume, a warning names the attributes
    that differ from their values at the save.

    Attributes of modules with `get_extra_state` and of optimizers with their own `state_dict` are not
    compared, because these methods determine what is saved. Plain attributes of optimizers are saved.

    Args:
        optimizer: the current optimizer; the attribute may be set to another one later.
        compares: whether this rank compares; the first rank that trains is enough.
    """

    def __init__(self, model: nn.Module, task: Any, optimizer: Optimizer, compares: bool) -> None:
        self._model, self._task, self.optimizer, self._compares = model, task, optimizer, compares
        self._num_steps = 0
        self._warned: set[str] = set()
        self._ignored = {*_OF_EVERY_MODULE, "plain_loss"}  # `Task.loss` sets the latter for the log
        self._first = self._before = dict(self._attributes()) if compares else {}

    def ignore(self, names: Iterable[str]) -> None:
        """Ignore the attributes `names` of the task, because each step sets them."""
        self._ignored.update(names)

    def start(self, saved: Mapping[str, Sequence[int]]) -> None:
        """Start, by comparing with the fingerprints in a checkpoint. Call it after the dry run.

        Args:
            saved: the result of `compare_at_save` for the checkpoint that the run resumed from.
        """
        if not self._compares:
            return
        self._before = dict(self._attributes())
        if lost := [name for name, then in saved.items() if self._before.get(name) != tuple(then)]:
            log.warning(
                "attributes had different values when the checkpoint was saved, and checkpoints do not "
                "contain them: %s. If a step depends on them, this run will differ from an uninterrupted "
                "one. %s",
                first_few(lost),
                _WAY_OUT,
            )

    def after_step(self) -> None:
        """Compare after the first two steps. Call it after each step."""
        self._num_steps += 1
        if self._compares and self._num_steps <= 2:
            self._compare(sizes_too=self._num_steps == 2)

    def compare_at_save(self) -> dict[str, Fingerprint]:
        """Compare before a save, and return the fingerprints of attributes that changed since the start."""
        if not self._compares:
            return {}
        self._compare(sizes_too=False)
        return {name: now for name, now in self._before.items() if now and now != self._first.get(name)}

    def _compare(self, sizes_too: bool) -> None:
        """Warn about attributes that have changed, including those whose size has changed if `sizes_too`."""
        attributes, changed = dict(self._attributes()), []
        for name, now in attributes.items():
            before = self._before.get(name)
            if now is None or before is None or now == before or name in self._warned:
                continue
            if sizes_too or now[0] == before[0]:
                changed.append(name)
        self._before = attributes
        self._warned.update(changed)
        if changed:
            log.warning(
                "attributes change during training, but checkpoints do not contain them: %s. If a step "
                "depends on them, a resumed run will differ from an uninterrupted one. %s",
                first_few(changed),
                _WAY_OUT,
            )

    def _attributes(self) -> Iterator[tuple[str, Fingerprint | None]]:
        model, task = self._model, self._task
        known = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
        for prefix, module in model.named_modules():
            if type(module).get_extra_state is nn.Module.get_extra_state:
                for name, value in vars(module).items():
                    if name not in _OF_EVERY_MODULE:
                        yield f"{prefix}.{name}" if prefix else name, fingerprint(value, known)
        # A task may be a module, but checkpoints do not contain its buffers and modules.
        parts = {**getattr(task, "_buffers", {}), **getattr(task, "_modules", {})}
        for name, value in (vars(task) | parts).items():
            if name not in self._ignored:
                yield f"task.{name}", fingerprint(value, known)
        if type(self.optimizer).state_dict is not Optimizer.state_dict:
            return
        optimizers = optimizers_in(self.optimizer)
        known |= set(map(id, optimizers))  # bound methods in attributes refer to them
        for part, path in optimizers.items():
            for name, value in own_attributes(part).items():
                if not is_plain(value):
                    yield f"{path}.{name}", fingerprint(value, known)


def fingerprint(value: Any, known: Collection[int]) -> Fingerprint | None:
    """Return the size and a checksum of the comparable parts of `value`; None if they can't be traversed.

    Args:
        known: ids of objects to skip, with their contents.
    """
    file = io.BytesIO()
    try:
        _Fingerprinter(file, known).dump(value)
    except Exception:  # a user's object may raise anything
        return None
    return file.tell(), zlib.crc32(file.getbuffer())


class _Fingerprinter(pickle.Pickler):
    """Serializes containers, modules, optimizers and users' objects to a stream that is only hashed.

    A tensor is reduced to its shape and a checksum (for a DTensor, of the local shard). Classes, functions
    and objects of libraries are reduced to the name of their type.
    """

    def __init__(self, file: io.BytesIO, known: Collection[int]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_id(self, item: Any) -> Any:
        """Return what to write in place of `item`; None to traverse it."""
        if id(item) in self._known:
            return "known"
        if isinstance(item, Tensor):
            return _tensor_fingerprint(item)
        if isinstance(item, torch.Generator):
            return _tensor_fingerprint(item.get_state())
        if isinstance(item, _CONTAINERS):
            return None if len(item) <= _MAX_ELEMENTS else str(len(item))
        return None if isinstance(item, _PLAIN) or _is_traversed(item) else type(item).__name__

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, nn.Module | Optimizer):
            return dict, (item.state_dict(),)
        is_plain = isinstance(item, (*_PLAIN, *_CONTAINERS)) or not _is_traversed(item)
        return NotImplemented if is_plain else (dict, (getattr(item, "__dict__", {}),))


def _is_traversed(item: Any) -> bool:
    is_part = isinstance(item, nn.Module | Optimizer)
    package = type(item).__module__.partition(".")[0]
    return is_part or (not isinstance(item, type) and _is_users_package(package))


def _tensor_fingerprint(tensor: Tensor) -> tuple[str, bytes] | str:
    # The tensor was computed in the step, or it may be a parameter that the optimizer updates.
    if tensor.requires_grad and (not tensor.is_leaf or isinstance(tensor, nn.Parameter)):
        return "computed"
    flat = to_local(tensor).reshape(-1)
    flat = flat[:: 1 + flat.numel() // _MAX_HASHED].cpu()
    return str(tuple(tensor.shape)), zlib.crc32(as_bytes(flat)).to_bytes(4)


@functools.cache
def _is_users_package(package: str) -> bool:
    """Return whether `package` is the user's own code; objects of libraries may be too large to search."""
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    is_installed = {"site-packages", "dist-packages"} & {*Path(file).parts}
    return package not in _NOT_TRAVERSED and not is_installed
