"""What modules, tasks and optimizers keep in attributes without saving it, so that a resume is not exact."""

import functools
import itertools
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
from trainer.tensors.local_shard import to_local
from trainer.tensors.nested import leaves

log = logging.getLogger(__name__)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_OF_EVERY_OPTIMIZER = {"state", "param_groups", "defaults"}
_PLAIN = (bool, int, float, complex, str, bytes, np.generic)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_NOT_WALKED = sys.stdlib_module_names | {"torch", "numpy", "trainer"}  # loggers, threads, streams, hooks
_MAX_OBJECTS = 10_000  # in one walk
_MAX_ELEMENTS = 1_000  # of one container
_MAX_HASHED = 2**20  # elements of a tensor; of a larger one at least half as many, evenly spread


class UnsavedState:
    """Compares the attributes of modules, task and optimizer after pairs of steps, and at each save.

    Warns of what changed. A pair is 1 and 2, 3 and 4, 7 and 8, 15 and 16, and so on, since state may begin
    late. What is new in a pair's first step or at a save, or of another size there, does not count, so that
    a cache is not state. A module with `get_extra_state`, and an optimizer with its own `state_dict`, decide
    themselves what is saved; not one of several, which are saved as one.

    Args:
        model: unwrapped.
        looks: whether this rank compares; one is enough, the first of those that train.
    """

    def __init__(self, model: nn.Module, task: Any, optimizer: Optimizer, looks: bool) -> None:
        self._model, self._task, self._optimizer, self._looks = model, task, optimizer, looks
        self._num_steps = 0
        self._before: dict[str, dict[str, Any]] = {}  # fingerprints of the last step of a pair
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

    def _compare(self, by_one_step: bool) -> dict[str, dict[str, Any]]:
        found = dict(self._attributes())
        self._warn_once(name for name, now in found.items() if self._is_changed(name, now, by_one_step))
        return found

    def _is_changed(self, name: str, now: dict[str, Any], by_one_step: bool) -> bool:
        before = self._before.get(name, now)
        if by_one_step:
            return before != now
        return any(_is_other_value(before.get(place), value) for place, value in now.items())

    def _warn_once(self, names: Iterable[str]) -> None:
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

    def _attributes(self) -> Iterator[tuple[str, dict[str, Any]]]:
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
        optimizers = {id(part): part for part in parts_of(self._optimizer)}.values()
        if len(optimizers) == 1 and type(self._optimizer).state_dict is not Optimizer.state_dict:
            return
        known |= {id(self._optimizer), *map(id, optimizers)}  # torch binds methods to them
        for part in optimizers:
            held = {name: v for name, v in vars(part).items() if name not in _OF_EVERY_OPTIMIZER}
            known |= {id(v) for v in leaves(held) if isinstance(v, Optimizer)}  # they share its state
            for name, value in held.items():
                if not name.startswith("_optimizer_"):
                    yield f"optimizer.{name}", fingerprint(value, known)


def fingerprint(value: Any, known: Collection[int] = ()) -> dict[str, Any]:
    """The values within `value` that can be compared, by their places, such as ".layers[0].scale".

    A number or text is its repr; a tensor or array its shape and a checksum, for a DTensor of its shard; a
    random generator a checksum. The place of a container ends with its length, as in ".seen (12)", and has
    the value True. None stands for anything else. Functions, class attributes and slots are not looked at.

    Args:
        known: ids of objects to leave out, with all that they hold.
    """
    found: dict[str, Any] = {}
    ahead: deque[tuple[str, Any]] = deque([("", value)])  # breadth first: a long list hides nothing beside it
    seen: dict[int, Any] = {}
    while ahead and len(seen) < _MAX_OBJECTS:
        place, item = ahead.popleft()
        if id(item) in known or id(item) in seen:
            continue
        if not isinstance(item, _PLAIN):
            seen[id(item)] = item  # kept, so that no id is used twice
        try:
            if (inside := _inside(item)) is None:
                found[place] = _value(item)
                continue
        except Exception:  # whatever the user's object does when it is looked at
            found[place] = None
            continue
        found[f"{place} ({len(inside)})"] = True
        parts = itertools.islice(inside.items(), _MAX_ELEMENTS)
        ahead.extend((f"{place}{name}", part) for name, part in parts)
    return found


def _is_other_value(before: Any, now: Any) -> bool:
    """Whether a value is another one of the same size: a cache that grew is not state."""
    if before is None or now is None or before == now:
        return False
    return not (isinstance(before, tuple) and isinstance(now, tuple) and before[0] != now[0])


def _inside(item: Any) -> dict[str, Any] | None:
    """The parts of `item` by what follows its place in theirs (".name", "[0]"); None for a leaf."""
    if isinstance(item, (*_PLAIN, *_GENERATORS, Tensor, np.ndarray, type)) or item is None:
        return None
    if isinstance(item, Mapping):
        return {f"[{key!r}]": part for key, part in item.items()}
    if isinstance(item, list | tuple | deque):
        return {f"[{at}]": part for at, part in enumerate(item)}
    if isinstance(item, set | frozenset):
        return {f"[{part!r}]": True for part in item if isinstance(part, _PLAIN)}
    if isinstance(item, nn.Module | Optimizer):
        saved = item.state_dict()
        return {f".{name}": v.detach() if isinstance(v, Tensor) else v for name, v in saved.items()}
    if _is_users(type(item).__module__.partition(".")[0]):
        return {f".{name}": part for name, part in getattr(item, "__dict__", {}).items()} or None
    return None


@functools.cache
def _is_users(package: str) -> bool:
    """Whether a class is of a user's own code, and not of a library, whose objects may be large."""
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    is_installed = {"site-packages", "dist-packages"} & {*Path(file).parts}
    return package not in _NOT_WALKED and not is_installed


def _value(leaf: Any) -> Any:
    """The value to compare of a leaf, as `fingerprint` says."""
    if isinstance(leaf, Tensor):
        # Computed by the step, or maybe a parameter that the optimizer updates.
        if leaf.requires_grad and (not leaf.is_leaf or isinstance(leaf, nn.Parameter)):
            return None
        flat = to_local(leaf).reshape(-1)
        flat = flat[:: 1 + flat.numel() // _MAX_HASHED].cpu().contiguous()
        return tuple(leaf.shape), zlib.crc32(flat.view(torch.uint8).numpy().data)
    if isinstance(leaf, np.ndarray):
        return leaf.shape, zlib.crc32(leaf.tobytes())
    if isinstance(leaf, torch.Generator):
        return _value(leaf.get_state())
    if isinstance(leaf, _GENERATORS):
        return zlib.crc32(pickle.dumps(leaf))
    return repr(leaf) if isinstance(leaf, _PLAIN) else None
