"""The fingerprint of any object: its numbers, text, tensors and random generators, by their places in it."""

import functools
import inspect
import itertools
import math
import random
import sys
import sysconfig
import warnings
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from multiprocessing.sharedctypes import SynchronizedBase
from types import FunctionType, GeneratorType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from trainer.local_shard import is_dtensor

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, np.generic)
_GENERATORS = (
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    torch.Generator,
)
_NOT_WALKED = sys.stdlib_module_names | {"torch", "numpy", "trainer"}  # loggers, threads, streams, hooks
_INSTALLED = (
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
)  # libraries keep caches in globals
_MAX_OBJECTS = 10_000  # in one walk
_MAX_ELEMENTS = 1_000  # of one container
_MAX_HASHED = 2**20  # elements of a tensor; of a larger one at least half as many, evenly spread


def fingerprint(value: Any, known: Collection[int] = (), largest: int | None = None) -> dict[str, Any]:
    """The values within `value` that can be compared, by their places, such as ".layers[0].scale".

    A number or text is its repr; a tensor or array its shape and the crc32 of its elements, for a DTensor
    of its local shard; a random generator its state. The place of a container ends with its length, as in
    ".seen (12)", and has the value True. None stands for anything else. Never raises, and looks at no more
    than 10,000 objects.

    Args:
        known: ids of objects to leave out, with all that they hold.
        largest: tensors and arrays of more elements are left out.
    """
    return {
        place: _value_if_any(leaf)
        for place, leaf in _walk(value, known)
        if largest is None or not isinstance(leaf, Tensor | np.ndarray) or math.prod(leaf.shape) <= largest
    }


def is_other_value(before: Any, now: Any) -> bool:
    """Whether a value is another one of the same size: a cache that grew is not state."""
    if before is None or now is None or before == now:
        return False
    return not (isinstance(before, tuple) and isinstance(now, tuple) and before[0] != now[0])


def generators(value: Any) -> dict[str, tuple[Any, Any]]:
    """The random generators that `value` holds, each with its state, by place; without the global ones."""
    # The functions of these two modules are methods of their global generators.
    of_python: Any = random.random
    of_numpy: Any = np.random.rand
    shared = (of_python.__self__, of_numpy.__self__, torch.default_generator)
    held = _walk(value, {id(part) for part in shared})
    return {place: (leaf, _value_if_any(leaf)) for place, leaf in held if isinstance(leaf, _GENERATORS)}


def class_data(kind: type) -> dict[str, Any]:
    """The attributes that a user's class and its bases define, without methods, properties and dunders."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if _is_walked(base):
            found |= {name: value for name, value in vars(base).items() if _is_data(name, value)}
    return found


def used_outside(kind: type) -> dict[str, Any]:
    """The globals, by module and name, and the closures of the methods of a user's class and its bases."""
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        for value in vars(base).values() if _is_walked(base) else ():
            method = getattr(value, "fget", None) or getattr(value, "__func__", value)
            for name, held in (_of_function(method) or {}).items():
                found[f"{base.__module__}{name}"] = held
    return found


def _of_function(value: Any) -> dict[str, Any] | None:
    """What a user's function may keep for its next call; None for others."""
    if not isinstance(value, FunctionType) or value.__code__.co_filename.startswith(_INSTALLED):
        return None
    if value.__module__.partition(".")[0] in _NOT_WALKED:
        return None
    names = inspect.getclosurevars(value)
    held = {**names.globals, **names.nonlocals, **vars(value)}
    return {f".{name}": part for name, part in held.items() if name != "__wrapped__"}


def _is_data(name: str, value: Any) -> bool:
    is_dunder = name.startswith("__") or name == "_abc_impl"
    return not is_dunder and not callable(value) and not hasattr(type(value), "__get__")


def _is_walked(kind: type) -> bool:
    """Whether to look at the attributes of this class and its instances: not at torch's or Python's own."""
    return kind.__module__.partition(".")[0] not in _NOT_WALKED


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
    if isinstance(item, dict):
        return {
            f"[{key!r}]" if isinstance(key, _PLAIN) else f"[key {at}]": part
            for at, (key, part) in enumerate(item.items())
        }
    if isinstance(item, list | tuple | deque):
        return {f"[{at}]": part for at, part in enumerate(item)}
    if isinstance(item, set | frozenset):
        return {f"[{key}]": True for key in sorted(repr(part) for part in item if isinstance(part, _PLAIN))}
    if isinstance(item, nn.Module):
        saved = item.state_dict()  # with what get_extra_state() gives
        tensors = {f".{name}": v.detach() if isinstance(v, Tensor) else v for name, v in saved.items()}
        return tensors | {
            f".{prefix}.{name}": part
            for prefix, module in item.named_modules()
            for name, part in vars(module).items()
            if name not in OF_EVERY_MODULE
        }
    if isinstance(item, MethodType):
        return {"": item.__self__}
    if isinstance(item, FunctionType):
        return _of_function(item)
    if isinstance(item, functools.partial):
        return {".func": item.func, ".args": item.args, ".keywords": item.keywords}
    if isinstance(item, Optimizer | LRScheduler):
        return {".state_dict()": item.state_dict()}
    if isinstance(item, GeneratorType):
        if (frame := item.gi_frame) is None:
            return None
        return {".at": frame.f_lasti} | {f".{name}": part for name, part in frame.f_locals.items()}
    if type(item).__module__ in ("builtins", "itertools") and hasattr(item, "__next__"):
        with warnings.catch_warnings(action="ignore"):  # later Pythons cannot copy those of itertools
            return {f".{at}": part for at, part in enumerate(item.__reduce_ex__(2)[1:])}
    if isinstance(item, SimpleNamespace | Dataset) or _is_walked(type(item)):
        return _attributes(item)
    return None


def _attributes(item: Any) -> dict[str, Any] | None:
    """The attributes of `item` and of its class; None if there are none, as for objects in C."""
    names: list[str] = []
    for kind in type(item).__mro__:
        slots = vars(kind).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    in_slots = {name: getattr(item, name) for name in names if name != "__dict__" and hasattr(item, name)}
    held = class_data(type(item)) | in_slots | getattr(item, "__dict__", {})
    return {f".{name}": part for name, part in held.items()} or None


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
    if isinstance(leaf, SynchronizedBase):
        return bytes(leaf.get_obj())
    if isinstance(leaf, torch.Generator):
        return _value(leaf.get_state())
    if isinstance(leaf, random.Random):
        return leaf.getstate()
    if isinstance(leaf, np.random.Generator):
        return _value(leaf.bit_generator)
    if isinstance(leaf, np.random.RandomState):
        return fingerprint(leaf.get_state(legacy=False))
    if isinstance(leaf, np.random.BitGenerator):
        return fingerprint(leaf.state)
    return repr(leaf) if isinstance(leaf, _PLAIN) else None


def bit_sums(named: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """The sum of the bits of each tensor, by name: another one means other bits. Reads each tensor once."""
    sums = {name: _bit_sum(tensor.detach()) for name, tensor in named}
    found: dict[str, int] = {}
    for device in {total.device for total in sums.values()}:  # one wait for each
        names = [name for name, total in sums.items() if total.device == device]
        found |= zip(names, torch.stack([sums[name] for name in names]).tolist(), strict=True)
    return found


def changed_bits(before: Mapping[str, int], named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names whose bits are others than when `bit_sums` gave `before`."""
    now = bit_sums(named)
    return [name for name, total in before.items() if now.get(name) != total]


def _bit_sum(tensor: Tensor) -> Tensor:
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().reshape(-1)
    lanes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.itemsize]
    if flat.nbytes % 8 == 0 and flat.storage_offset() * flat.itemsize % 8 == 0:
        lanes = torch.int64  # on a CPU in a fifteenth of the time
    return flat.view(lanes).sum(dtype=torch.int64)
