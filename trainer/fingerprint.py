"""What the attributes of an object hold: numbers, text, tensors, random generators, by their places."""

import copy
import functools
import itertools
import random
import sys
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from trainer.bits import same_bits
from trainer.local_shard import is_dtensor

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, np.generic)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_NOT_WALKED = sys.stdlib_module_names | {"torch", "numpy", "trainer"}  # loggers, threads, streams, hooks
_MAX_OBJECTS = 10_000  # in one walk
_MAX_ELEMENTS = 1_000  # of one container
_MAX_HASHED = 2**20  # elements of a tensor; of a larger one at least half as many, evenly spread


def fingerprint(value: Any, known: Collection[int] = ()) -> dict[str, Any]:
    """The values within `value` that can be compared, by their places, such as ".layers[0].scale".

    A number or text is its repr; a tensor or array its shape and the crc32 of its elements, for a DTensor
    of its local shard; a random generator its state. The place of a container ends with its length, as in
    ".seen (12)", and has the value True. None stands for anything else. Functions and what they refer to
    are not looked at, nor are class attributes and slots. Never raises.

    Args:
        known: ids of objects to leave out, with all that they hold.
    """
    return {place: _value_if_any(leaf) for place, leaf in _walk(value, known)}


def is_other_value(before: Any, now: Any) -> bool:
    """Whether a value is another one of the same size: a cache that grew is not state."""
    if before is None or now is None or before == now:
        return False
    return not (isinstance(before, tuple) and isinstance(now, tuple) and before[0] != now[0])


def generators(value: Any) -> dict[str, tuple[Any, Any]]:
    """The random generators that `value` holds, each with its state, by place."""
    held = _walk(value, known=())
    return {place: (leaf, _value_if_any(leaf)) for place, leaf in held if isinstance(leaf, _GENERATORS)}


class Trace:
    """Buffers, extra state and random generators of a model, as they are now, to compare and put back."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        self._extra = {
            name or type(module).__name__: (module, copy.deepcopy(module.get_extra_state()))
            for name, module in model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        held = generators(model).items()
        self._generators = {place: (each, copy.deepcopy(each), state) for place, (each, state) in held}

    def changed_extra_states(self) -> list[str]:
        return [
            f"what get_extra_state() of {name} gives"
            for name, (module, was) in self._extra.items()
            if fingerprint(module.get_extra_state()) != fingerprint(was)
        ]

    def changed_generators(self) -> list[str]:
        now = generators(self._model)
        return [
            f"the random generator {place.strip('.')}"
            for place, (*_, state) in self._generators.items()
            if now.get(place, (None, None))[1] != state
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """A buffer that the pass made, or made larger, stays: its module may know its size."""
        for name, buffer in self._model.named_buffers():
            was = self._buffers.get(name)
            if was is not None and was.shape == buffer.shape and not same_bits(was, buffer.detach()):
                buffer.copy_(was)
        for module, state in self._extra.values():
            module.set_extra_state(state)
        for generator, was, _ in self._generators.values():
            _set_state(generator, was)


def _set_state(generator: Any, of: Any) -> None:
    """Give a random generator the state of another of its kind."""
    if isinstance(generator, random.Random):
        generator.setstate(of.getstate())
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = of.bit_generator.state
    else:
        generator.set_state(of.get_state())


def _walk(value: Any, known: Collection[int]) -> Iterator[tuple[str, Any]]:
    """Leaves and containers by place; breadth first, so that a long list hides nothing beside it."""
    ahead: deque[tuple[str, Any]] = deque([("", value)])
    seen: dict[int, Any] = {}
    for _ in range(_MAX_OBJECTS):
        if not ahead:
            return
        place, item = ahead.popleft()
        if id(item) in known or id(item) in seen:
            continue
        if not isinstance(item, _PLAIN):
            seen[id(item)] = item  # kept, so that no id is used twice
        try:
            inside = _inside(item)
        except Exception:  # whatever the user's object does when it is looked at
            inside = None
        if inside is None:
            yield place, item
            continue
        yield f"{place} ({len(inside)})", True
        parts = itertools.islice(inside.items(), _MAX_ELEMENTS)
        ahead.extend((f"{place}{name}", part) for name, part in parts)


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
    if isinstance(item, nn.Module):
        saved = item.state_dict()  # with what get_extra_state() gives
        tensors = {f".{name}": v.detach() if isinstance(v, Tensor) else v for name, v in saved.items()}
        return tensors | {
            f".{prefix}.{name}": part
            for prefix, module in item.named_modules()
            for name, part in vars(module).items()
            if name not in OF_EVERY_MODULE
        }
    if isinstance(item, Optimizer | LRScheduler):
        return {".state_dict()": item.state_dict()}
    if _is_users(type(item).__module__.partition(".")[0]) or isinstance(item, Dataset):
        return {f".{name}": part for name, part in getattr(item, "__dict__", {}).items()} or None
    return None


@functools.cache
def _is_users(package: str) -> bool:
    """Whether a class is of a user's own code, and not of a library, whose objects may be large."""
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    is_installed = {"site-packages", "dist-packages"} & {*Path(file).parts}
    return package not in _NOT_WALKED and not is_installed


def _value_if_any(leaf: Any) -> Any:
    """The value to compare of a leaf, as `fingerprint` says."""
    try:
        return _value(leaf)
    except Exception:  # a tensor without memory, a generator of another library
        return None


def _value(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        held = leaf.to_local() if is_dtensor(leaf) else leaf
        # Computed by the step, or maybe a parameter that the optimizer updates.
        is_updated = leaf.requires_grad and (not leaf.is_leaf or isinstance(leaf, nn.Parameter))
        if is_updated or held.is_meta or held.layout != torch.strided:
            return None
        flat = held.detach().reshape(-1)
        flat = flat[:: 1 + flat.numel() // _MAX_HASHED].cpu().contiguous()
        return (tuple(leaf.shape), zlib.crc32(flat.view(torch.uint8).numpy().data))
    if isinstance(leaf, np.ndarray):
        return (leaf.shape, zlib.crc32(leaf.tobytes()))
    if isinstance(leaf, torch.Generator):
        return _value(leaf.get_state())
    if isinstance(leaf, random.Random):
        return leaf.getstate()
    if isinstance(leaf, np.random.Generator):
        return fingerprint(leaf.bit_generator.state)
    if isinstance(leaf, np.random.RandomState):
        return fingerprint(leaf.get_state(legacy=False))
    return repr(leaf) if isinstance(leaf, _PLAIN) else None
