"""What modules, tasks and optimizers keep in attributes without saving it, so that a resume is not exact."""

import functools
import io
import logging
import pickle
import random
import sys
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.errors import first_few
from trainer.optim.optimizers import parts_of
from trainer.tensors.bits import as_bytes
from trainer.tensors.local_shard import to_local
from trainer.tensors.nested import leaves

log = logging.getLogger(__name__)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_OF_EVERY_OPTIMIZER = {"state", "param_groups", "defaults"}
_CONTAINERS = (Mapping, list, tuple, deque, set, frozenset)
# Which pickle writes by itself.
_PLAIN: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes, np.generic, np.ndarray)
_PLAIN += (random.Random, np.random.Generator, np.random.BitGenerator, np.random.RandomState)
_NOT_WALKED = sys.stdlib_module_names | {"torch", "numpy", "trainer"}  # loggers, threads, streams, hooks
_MAX_ELEMENTS = 10_000  # of a container that is looked into
_MAX_HASHED = 2**20  # elements of a tensor; of a larger one at least half as many, evenly spread

Print = tuple[int, int]
"""The size and a checksum of what an attribute holds."""


class UnsavedState:
    """Compares the attributes of modules, task and optimizer after pairs of steps, and at each save.

    Warns of what changed. A pair is 1 and 2, 3 and 4, 7 and 8, 15 and 16, and so on, since state may begin
    late. What is new in a pair's first step or at a save, or of another size there, does not count, so that
    a cache is not state. A module with `get_extra_state`, and an optimizer with its own `state_dict`, decide
    themselves what is saved; not one of several, which are saved as one.

    Args:
        model: unwrapped.
        optimizer: may be replaced by another.
        looks: whether this rank compares; one is enough, the first of those that train.
    """

    def __init__(self, model: nn.Module, task: Any, optimizer: Optimizer, looks: bool) -> None:
        self._model, self._task, self.optimizer, self._looks = model, task, optimizer, looks
        self._num_steps = 0
        self._before: dict[str, Print | None] = {}  # fingerprints of the last step of a pair
        self._warned: set[str] = set()
        self._left_out = {*_OF_EVERY_MODULE, "plain_loss"}  # `Task.loss` sets the latter for the log

    def leave_out(self, names: Iterable[str]) -> None:
        """Attributes of the task that each step sets again."""
        self._left_out.update(names)

    def look(self) -> None:
        """Called after each step."""
        if not self._looks:
            return
        self._num_steps += 1
        is_second = self._num_steps.bit_count() == 1
        if is_second or (self._num_steps + 1).bit_count() == 1:
            self._before = self._compare(is_second)

    def look_at_save(self) -> None:
        """Called before each save."""
        if self._looks and self._num_steps > 2:
            self._compare(by_one_step=False)

    def _compare(self, by_one_step: bool) -> dict[str, Print | None]:
        found = dict(self._attributes())
        changed = []
        for name, now in found.items():
            if now is not None:
                before = self._before.get(name) or now
                if now != before and (by_one_step or now[0] == before[0]):
                    changed.append(name)
        self._warn_once(changed)
        return found

    def _warn_once(self, names: list[str]) -> None:
        changed = [name for name in names if name not in self._warned]
        self._warned.update(changed)
        if changed:
            log.warning(
                "%s changes from step to step, and no checkpoint holds it: if a step depends on the value "
                "that the one before left, a resumed run will differ; make it a buffer of the model "
                "(register_buffer), or give its module get_extra_state and set_extra_state; what an "
                "optimizer keeps belongs in its state",
                first_few(changed),
            )

    def _attributes(self) -> Iterator[tuple[str, Print | None]]:
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
        optimizers = {id(part): part for part in parts_of(self.optimizer)}.values()
        if len(optimizers) == 1 and type(self.optimizer).state_dict is not Optimizer.state_dict:
            return
        known |= {id(self.optimizer), *map(id, optimizers)}  # torch binds methods to them
        for part in optimizers:
            held = {name: v for name, v in vars(part).items() if name not in _OF_EVERY_OPTIMIZER}
            known |= {id(v) for v in leaves(held) if isinstance(v, Optimizer)}  # they share its state
            for name, value in held.items():
                if not name.startswith("_optimizer_"):
                    yield f"optimizer.{name}", fingerprint(value, known)


def fingerprint(value: Any, known: Collection[int]) -> Print | None:
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
