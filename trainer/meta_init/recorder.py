"""Records what a constructor does to tensors without memory, and replays it on real memory."""

import contextlib
import functools
import gc
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.distributed.seeding import mixed_seed
from trainer.meta_init.operations import (
    OVERWRITES,
    Given,
    Operation,
    Operations,
    StorageSlice,
    checksum,
    storage_of,
)
from trainer.nested import leaves, mapped

_aten = torch.ops.aten
# They return their first argument; on the meta device torch takes up to 2 ms in Python for it.
_SLOW_ON_META = {_aten.uniform_.default, _aten.normal_.default, _aten.erfinv_.default, _aten.clamp_.default}
_SMALL_BYTES = 1 << 16
_MANY_OBJECTS = 100_000
KINDS = (Tensor, nn.Parameter, nn.Buffer)


class NotRecordable(BaseException):
    """The constructor did something that cannot be recorded; its own `except Exception` must not catch it."""


@contextlib.contextmanager
def new_objects_alone() -> Iterator[None]:
    """The garbage collector sees only objects created within, not half a million older ones: saves 0.3 s."""
    # What others have frozen must stay so; to count it takes 0.1 s, so first see whether there is need.
    needed = len(gc.get_objects()) > _MANY_OBJECTS and gc.get_freeze_count() == 0
    if needed:
        gc.freeze()
    try:
        yield
    finally:
        if needed:
            gc.unfreeze()


class InitRecorder(TorchDispatchMode):
    """Puts all operations within on the meta device, and records them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._torch_seed = torch.initial_seed()
        self.operations = Operations()
        self._num_draws = 0
        self.keeps_given = False  # whether tensors with data never change, like those of a file
        self._is_replaying = False

    def holds(self, tensor: Tensor) -> bool:
        return storage_of(tensor) in self.operations.storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        values = leaves((args, kwargs))
        inputs = [value for value in values if isinstance(value, Tensor)]
        held = [storage_of(tensor) for tensor in inputs if self.holds(tensor)]
        is_factory = not inputs and "device" in kwargs
        if self._is_replaying or not (is_factory or held):
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            raise NotRecordable("it draws from its own generator")
        if any(isinstance(value, torch.UntypedStorage) for value in values):
            raise NotRecordable(f"it handles memory itself ({func})")
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta"), "pin_memory": False}
            kwargs = {key: value for key, value in kwargs.items() if key != "non_blocking"}
        written = _written(func, args, kwargs)
        if any(not self.holds(tensor) for tensor in written):
            raise NotRecordable(f"it writes into a tensor that has data ({func})")
        arguments, options = mapped((args, kwargs), self._noted)
        reads, writes = set(held), set(map(storage_of, written))
        if len(held) < len(inputs):
            args, kwargs = mapped((args, kwargs), self._on_meta)
        try:
            result = inputs[0] if func in _SLOW_ON_META else func(*args, **kwargs)
        except Exception as error:  # orthogonal() of torch catches a NotImplementedError and continues
            raise NotRecordable(f"it uses {func}, which fails without memory") from error
        outputs = [self._new(value) for value in leaves(result) if isinstance(value, Tensor)]
        writes |= {place.storage for place in outputs if place is not None}
        if writes:  # else the result is a view, described by its place
            seed = None
            if torch.Tag.nondeterministic_seeded in func.tags:
                self.check_seed()
                seed, self._num_draws = mixed_seed(self._seed, self._num_draws), self._num_draws + 1
            if func in OVERWRITES and not (len(inputs) > 1 and inputs[0] is inputs[1]):
                reads = set(held[1:])
            self.operations.append(Operation(func, arguments, options, outputs, reads, writes, seed))
        return result

    def check_seed(self) -> None:
        """Refuse a seed set by the constructor, even for one tensor (fork_rng): it would be ignored here."""
        if torch.initial_seed() != self._torch_seed:
            raise NotRecordable("it seeds torch itself")

    def _new(self, tensor: Tensor) -> StorageSlice | None:
        if tensor.layout != torch.strided or tensor.untyped_storage().device.type != "meta":
            raise NotRecordable(f"it makes a tensor of layout {tensor.layout} on {tensor.device}")
        if self.holds(tensor):
            return None
        place = StorageSlice.of(tensor)
        self.operations.storages[place.storage] = tensor.untyped_storage()
        return place

    def _noted(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return torch.device("cpu") if isinstance(value, torch.device) else value
        if self.holds(value):
            return StorageSlice.of(value)
        if self.keeps_given:
            return Given(value, None)
        small = value.untyped_storage().nbytes() <= _SMALL_BYTES
        return Given(value.clone(), None) if small else Given(value, checksum(value))

    def check_given(self) -> None:
        for operation in self.operations:
            for value in leaves((operation.arguments, operation.options)):
                if isinstance(value, Given) and not value.is_as_it_was():
                    raise NotRecordable("it changes a tensor after it has used it to initialise another")

    def address(self, tensor: Tensor) -> int:
        """A distinct number for each memory and each place in it."""
        place = StorageSlice.of(tensor)
        return (place.storage << 40) + place.offset * tensor.itemsize

    def _on_meta(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or self.holds(value):
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")

    def value(self, tensor: Tensor) -> Tensor:
        """A copy of the present values of `tensor`."""
        place, was_replaying, self._is_replaying = StorageSlice.of(tensor), self._is_replaying, True
        try:
            with torch.no_grad():
                return place.on(self.operations.replay({place.storage})[place.storage])
        finally:
            self._is_replaying = was_replaying

    def alive(self, besides: Collection[Tensor]) -> list[Tensor]:
        """The other recorded leaf tensors to which any object still refers."""
        known = {id(tensor) for tensor in besides}

        def found() -> list[Tensor]:
            others = [each for each in gc.get_objects() if type(each) in KINDS and id(each) not in known]
            # Other tensors than leaves belong to a graph of the constructor's, which is never used again.
            return [each for each in others if each.is_meta and each.is_leaf and self.holds(each)]

        if found():
            gc.collect()  # some may be garbage
        return found()


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that `func` changes."""
    values = [args[at] if at < len(args) else kwargs.get(name) for at, name in _written_arguments(func)]
    return [value for value in leaves(values) if isinstance(value, Tensor)]


@functools.cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    arguments = enumerate(func._schema.arguments)
    return [(at, each.name) for at, each in arguments if each.alias_info and each.alias_info.is_write]
