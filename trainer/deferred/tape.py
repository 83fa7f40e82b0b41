"""What a constructor does to tensors that have no memory, remembered, and done for real when asked for."""

import contextlib
import gc
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.deferred.unwritten import mark_unwritten
from trainer.errors import UserError
from trainer.seeding import mixed_seed

_aten = torch.ops.aten
# These write all of their first argument without reading it.
_OVERWRITES = {
    _aten.uniform_.default,
    _aten.normal_.default,
    _aten.zero_.default,
    _aten.fill_.Scalar,
    _aten.copy_.default,
}
_RESIZES = {_aten.resize_.default}
_SMALL_BYTES = 1 << 16
KINDS = (Tensor, nn.Parameter, nn.Buffer)


class NotRecordable(BaseException):
    """The constructor did what no tape can hold; none of its own `except Exception` is to take it."""


@contextlib.contextmanager
def new_objects_alone() -> Iterator[None]:
    """The garbage collector sees what is made within, not the half million objects of before: 0.3 s."""
    frozen_by_others = gc.get_freeze_count() > 0  # who mean that to last
    if not frozen_by_others:
        gc.freeze()
    try:
        yield
    finally:
        if not frozen_by_others:
            gc.unfreeze()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in its memory, which is known by the number of its storage."""

    storage: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class _Given:
    """A tensor with data of its own, from a file or a list, as it was when it was used."""

    tensor: Tensor
    checksum: int | None  # None where nobody else can write to it

    def is_as_it_was(self) -> bool:
        """torch itself counts no writes by NumPy, into buffers, or to `.data`."""
        return self.checksum is None or _checksum(self.tensor) == self.checksum

    def get(self) -> Tensor:
        if not self.is_as_it_was():
            raise UserError(
                f"model: a tensor of shape {tuple(self.tensor.shape)} that others begin from was changed "
                "since the model was built; leave it as it was, or give them a copy"
            )
        return self.tensor


@dataclass(frozen=True, slots=True)
class _Operation:
    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    outputs: list[_Place | None]  # of those tensors that are new; None for the others
    reads: set[int]
    writes: set[int]
    seed: int | None


class Tape(TorchDispatchMode):
    """Puts what runs within on the meta device, and remembers it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._torch_seed = torch.initial_seed()
        self._operations: list[_Operation] = []
        self._num_draws = 0
        self.keeps_given = False  # whether nobody writes to tensors with data: true of those of a file
        # Held, so that no address comes twice; meta storages are empty.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._is_replaying = False

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def place(self, tensor: Tensor) -> _Place:
        storage = tensor.untyped_storage()._cdata
        return _Place(storage, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [tensor for tensor in _leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        is_factory = not inputs and "device" in kwargs
        if self._is_replaying or not (is_factory or any(map(self.holds, inputs))):
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            raise NotRecordable("it draws from a generator of its own")
        if any(isinstance(value, torch.UntypedStorage) for value in _leaves((args, kwargs))):
            raise NotRecordable(f"it handles memory itself ({func})")
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta"), "pin_memory": False}
            kwargs = {key: value for key, value in kwargs.items() if key != "non_blocking"}
        written = _written(func, args, kwargs)
        if any(not self.holds(tensor) for tensor in written):
            raise NotRecordable(f"it writes into a tensor with data of its own ({func})")
        arguments, options = mapped((args, kwargs), self._noted)
        reads = {self.place(tensor).storage for tensor in inputs if self.holds(tensor)}
        writes = {self.place(tensor).storage for tensor in written}
        try:
            result = func(*mapped(args, self._on_meta), **mapped(kwargs, self._on_meta))
        except Exception as error:  # torch's own orthogonal() takes a NotImplementedError, and goes on
            raise NotRecordable(f"it uses {func}, which fails where there is no memory") from error
        outputs = [self._new(value) for value in _leaves(result) if isinstance(value, Tensor)]
        writes |= {place.storage for place in outputs if place is not None}
        if writes:  # else it has made a view, whose place says all
            seed = None
            if torch.Tag.nondeterministic_seeded in func.tags:
                self.check_seed()
                seed, self._num_draws = mixed_seed(self._seed, self._num_draws), self._num_draws + 1
            if func in _OVERWRITES and not (len(inputs) > 1 and inputs[0] is inputs[1]):
                reads -= {self.place(inputs[0]).storage}
                reads |= {self.place(tensor).storage for tensor in inputs[1:] if self.holds(tensor)}
            self._operations.append(_Operation(func, arguments, options, outputs, reads, writes, seed))
        return result

    def check_seed(self) -> None:
        """What the constructor seeds itself, be it for one tensor (fork_rng), are its own numbers to draw."""
        if torch.initial_seed() != self._torch_seed:
            raise NotRecordable("it seeds torch itself")

    def _new(self, tensor: Tensor) -> _Place | None:
        if tensor.layout != torch.strided or tensor.untyped_storage().device.type != "meta":
            raise NotRecordable(f"it makes a tensor of layout {tensor.layout} on {tensor.device}")
        if self.holds(tensor):
            return None
        place = self.place(tensor)
        self._storages[place.storage] = tensor.untyped_storage()
        return place

    def _noted(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return torch.device("cpu") if isinstance(value, torch.device) else value
        if self.holds(value):
            return self.place(value)
        if self.keeps_given:
            return _Given(value, None)
        small = value.untyped_storage().nbytes() <= _SMALL_BYTES
        return _Given(value.clone(), None) if small else _Given(value, _checksum(value))

    def check_given(self) -> None:
        for operation in self._operations:
            for value in _leaves((operation.arguments, operation.options)):
                if isinstance(value, _Given) and not value.is_as_it_was():
                    raise NotRecordable("it changes a tensor after it has used it to initialise another")

    def address(self, tensor: Tensor) -> int:
        """Another number for each memory, and each place in it."""
        place = self.place(tensor)
        return (place.storage << 40) + place.offset * tensor.itemsize

    def _on_meta(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or self.holds(value):
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")

    def value(self, tensor: Tensor) -> Tensor:
        """A copy of what `tensor` would hold by now."""
        place = self.place(tensor)
        storage = self.replay({place.storage})[place.storage]
        with self._replaying():
            return place.on(storage)

    @contextlib.contextmanager
    def _replaying(self) -> Iterator[None]:
        before, was_replaying, self._is_replaying = torch.get_rng_state(), self._is_replaying, True
        try:
            with torch.no_grad():
                yield
        finally:
            self._is_replaying = was_replaying
            torch.set_rng_state(before)

    def replay(self, storages: set[int]) -> dict[int, torch.UntypedStorage]:
        """Make the memory of these storages, by their numbers."""
        needed, chosen = set(storages), []
        for operation in reversed(self._operations):
            if needed.isdisjoint(operation.writes):
                continue
            chosen.append(operation)
            if operation.function in _OVERWRITES and self._covers(operation.arguments[0]):
                needed -= operation.writes  # whatever was there before
            needed |= operation.reads
        made: dict[int, torch.UntypedStorage] = {}
        last_use = {n: index for index, op in enumerate(reversed(chosen)) for n in op.reads | op.writes}
        with self._replaying():
            for index, operation in enumerate(reversed(chosen)):
                self._redo(operation, made)
                for number in operation.reads | operation.writes:
                    if last_use[number] == index and number not in storages:
                        made.pop(number, None)
        return made

    def is_written(self, tensor: Tensor) -> bool:
        """Whether anything was done to the memory of `tensor` but to take it."""
        number = self.place(tensor).storage
        writers = [operation for operation in self._operations if number in operation.writes]
        return not all("empty" in op.function.name() or op.function in _RESIZES for op in writers)

    def alive(self, besides: Collection[Tensor]) -> list[Tensor]:
        """The other leaves among the tensors made here that anything refers to, wherever that is."""
        known = {id(tensor) for tensor in besides}

        def found() -> list[Tensor]:
            others = [each for each in gc.get_objects() if type(each) in KINDS and id(each) not in known]
            # Others than leaves belong to a graph of the constructor's, which nobody goes through again.
            return [each for each in others if each.is_meta and each.is_leaf and self.holds(each)]

        if found():
            gc.collect()  # of these some may be held by nobody any more
        return found()

    def _covers(self, place: _Place) -> bool:
        """Whether a tensor is all of its memory."""
        dense = place.size.numel() * place.dtype.itemsize == self._storages[place.storage].nbytes()
        return dense and 0 not in place.stride

    def _redo(self, operation: _Operation, made: dict[int, torch.UntypedStorage]) -> None:
        def real(value: Any) -> Any:
            if isinstance(value, _Given):
                return value.get()
            if not isinstance(value, _Place):
                return value
            if value.storage not in made:  # about to be overwritten, so never made
                made[value.storage] = torch.UntypedStorage(self._storages[value.storage].nbytes())
            return value.on(made[value.storage])

        if operation.seed is not None:
            torch.default_generator.manual_seed(operation.seed)
        arguments, options = mapped((operation.arguments, operation.options), real)
        before = arguments[0].untyped_storage().nbytes() if operation.function in _RESIZES else 0
        result = operation.function(*arguments, **options)
        if operation.function in _RESIZES and (grown := result.untyped_storage().nbytes()) > before:
            of_all = torch.empty(0, dtype=result.dtype).set_(result.untyped_storage())
            mark_unwritten(of_all[before // result.itemsize : grown // result.itemsize])
        tensors = [value for value in _leaves(result) if isinstance(value, Tensor)]
        for tensor, place in zip(tensors, operation.outputs, strict=True):
            if place is None:
                continue
            if (tensor.size(), tensor.stride(), tensor.storage_offset()) != (place.size, place.stride, 0):
                tensor = torch.empty_strided(place.size, place.stride, dtype=place.dtype).copy_(tensor)
            if "empty" in operation.function.name():
                mark_unwritten(tensor)
            made[place.storage] = tensor.untyped_storage()


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that `func` changes."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [tensor for tensor in _leaves(value) if isinstance(tensor, Tensor)]
    return found


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(mapped(item, change) for item in value)
    if type(value) is dict:
        return {key: mapped(item, change) for key, item in value.items()}
    return change(value)
