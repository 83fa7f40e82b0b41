"""A model built without memory: its constructor is recorded, and replayed for each tensor that is needed.

While the constructor runs, every tensor it makes lies on the meta device, and what it does to them goes on a
tape. To fill a tensor, those operations that its memory depends on are done for real, and no others, so that
nobody ever holds more of the model than is asked for. Each random operation draws from a generator of its
own, seeded by the run's seed and by its place on the tape: the numbers are the same whoever replays it, and
however little of the rest. (torchdistX's deferred_init does the same in C++, with one generator for all.)
"""

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.errors import UserError
from trainer.seeding import mixed_seed, seed_everything

log = logging.getLogger(__name__)

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
# Asked for a value, not for a tensor: computed at once.
_READS = {
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.equal,
    Tensor.allclose,
    torch.equal,
    torch.allclose,
}
_SMALL_BYTES = 1 << 16
_KINDS = (Tensor, nn.Parameter, nn.Buffer)
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# In memory that was never written: a NaN, so that what is computed of it is one, and no other NaN.
_UNWRITTEN = {2: 0x7FE5, 4: 0x7FE5A5A5, 8: 0x7FF9A5A5A5A5A5A5}


class _NotRecordable(BaseException):
    """The constructor did what no tape can hold; none of its own `except Exception` is to take it."""


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
    version: int

    def get(self) -> Tensor:
        if self.tensor._version != self.version:
            raise _NotRecordable("it changes a tensor after it has used it to initialise another")
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
            raise _NotRecordable("it draws from a generator of its own")
        if any(isinstance(value, torch.UntypedStorage) for value in _leaves((args, kwargs))):
            raise _NotRecordable(f"it handles memory itself ({func})")
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta"), "pin_memory": False}
            kwargs = {key: value for key, value in kwargs.items() if key != "non_blocking"}
        written = _written(func, args, kwargs)
        if any(not self.holds(tensor) for tensor in written):
            raise _NotRecordable(f"it writes into a tensor with data of its own ({func})")
        arguments, options = _mapped((args, kwargs), self._noted)
        reads = {self.place(tensor).storage for tensor in inputs if self.holds(tensor)}
        writes = {self.place(tensor).storage for tensor in written}
        try:
            result = func(*_mapped(args, self._on_meta), **_mapped(kwargs, self._on_meta))
        except Exception as error:  # torch's own orthogonal() takes a NotImplementedError, and goes on
            raise _NotRecordable(f"it uses {func}, which fails where there is no memory") from error
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
            raise _NotRecordable("it seeds torch itself")

    def _new(self, tensor: Tensor) -> _Place | None:
        if tensor.layout != torch.strided or tensor.untyped_storage().device.type != "meta":
            raise _NotRecordable(f"it makes a tensor of layout {tensor.layout} on {tensor.device}")
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
        small = value.untyped_storage().nbytes() <= _SMALL_BYTES
        return _Given(*((value.clone(), 0) if small else (value, value._version)))

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

    def found_alive(self, known: Collection[Tensor]) -> list[Tensor]:
        """Tensors of this tape that somebody holds, wherever that is, besides those `known`."""

        def alive() -> list[Tensor]:
            found = [each for each in gc.get_objects() if type(each) in _KINDS and id(each) not in names]
            # Others than leaves belong to a graph of the constructor's, which nobody goes through again.
            found = [each for each in found if each.is_meta and each.is_leaf and self.holds(each)]
            # What a view is of lives as long as the view, though nobody may hold it but `found`.
            return [each for each in found if id(each) not in bases or len(gc.get_referrers(each)) > 1]

        names = {id(tensor) for tensor in known}
        bases = {id(tensor._base) for tensor in known}
        if alive():
            gc.collect()  # of these some may be held by nobody any more
        return alive()

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
        arguments, options = _mapped((operation.arguments, operation.options), real)
        before = arguments[0].untyped_storage().nbytes() if operation.function in _RESIZES else 0
        result = operation.function(*arguments, **options)
        if operation.function in _RESIZES and (grown := result.untyped_storage().nbytes()) > before:
            of_all = torch.empty(0, dtype=result.dtype).set_(result.untyped_storage())
            _mark_unwritten(of_all[before // result.itemsize : grown // result.itemsize])
        tensors = [value for value in _leaves(result) if isinstance(value, Tensor)]
        for tensor, place in zip(tensors, operation.outputs, strict=True):
            if place is None:
                continue
            if (tensor.size(), tensor.stride(), tensor.storage_offset()) != (place.size, place.stride, 0):
                tensor = torch.empty_strided(place.size, place.stride, dtype=place.dtype).copy_(tensor)
            if "empty" in operation.function.name():
                _mark_unwritten(tensor)
            made[place.storage] = tensor.untyped_storage()


class _Illusion(TorchFunctionMode):
    """Lets a constructor believe that its tensors lie on the CPU, and gives it what it reads (`.item()`).

    Initialisers, torch's own among them, leave out what they are told is on the meta device.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape
        self._seems = {
            Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
            Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
            Tensor.device.__get__: torch.device("cpu"),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._seems and self._tape.holds(args[0]):
            return self._seems[func]
        if func in _READS:
            args = _mapped(args, self._value)
        result = func(*args, **(kwargs or {}))
        if func in (Tensor.numpy, Tensor.__array__):
            result.flags.writeable = False  # what is written there would be lost
        return result

    def _value(self, value: Any) -> Any:
        return self._tape.value(value) if isinstance(value, Tensor) and self._tape.holds(value) else value


class Deferred:
    """A model on the meta device, or whole, and how to fill it.

    Attributes:
        module: as its constructor made it; equal on every rank.
        notes: why it was built whole, if it was.
    """

    def __init__(self, module: nn.Module, tape: Tape | None, *notes: str) -> None:
        self.module, self.notes, self._tape = module, notes, tape
        self._names: dict[int, str] = {}
        for name, tensor in _named_tensors(module):
            self._names.setdefault(id(tensor), name)

    def fill(self, module: nn.Module) -> None:
        """Give the tensors of `module`, the model or a part of it, their memory on the CPU and their values.

        Raises:
            UserError: a parameter that the constructor has left as memory came, by name.
        """
        if self._tape is None:
            return
        waiting = {id(t): t for _, t in _named_tensors(module) if t.is_meta}
        by_storage: dict[int, list[Tensor]] = {}
        for tensor in waiting.values():
            by_storage.setdefault(self._tape.place(tensor).storage, []).append(tensor)
        for number, tensors in by_storage.items():
            storage = self._tape.replay({number})[number]
            for tensor in tensors:
                real = self._tape.place(tensor).on(storage)
                self._check(real, tensor)
                _replace(module, tensor, real)

    def fill_hidden(self) -> None:
        """Give their values to tensors that no module holds: those of closures, caches, objects of any kind.

        `fill` would not come upon them, so they are whole from the start, on every rank.
        """
        assert self._tape is not None
        named = [tensor for _, tensor in _named_tensors(self.module) if self._tape.holds(tensor)]
        shared = {self._tape.place(tensor).storage for tensor in named}
        by_storage: dict[int, list[Tensor]] = {}
        for tensor in self._tape.found_alive(named):
            by_storage.setdefault(self._tape.place(tensor).storage, []).append(tensor)
        if not shared.isdisjoint(by_storage):
            raise _NotRecordable("it holds, where nobody finds it, a part of a tensor that a module holds")
        for number, tensors in by_storage.items():
            storage = self._tape.replay({number})[number]
            for tensor in tensors:
                if weakref.getweakrefs(tensor):
                    raise _NotRecordable("it holds, where nobody finds it, a tensor with weak references")
                with contextlib.suppress(RuntimeError):  # kept by a graph alone, or a gradient
                    torch.utils.swap_tensors(tensor, _like(tensor, self._tape.place(tensor).on(storage)))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin from `tensors`, by their names in the module; they are held until this object goes."""
        if self._tape is None:
            self.module.load_state_dict(tensors, strict=False)
            return
        with _Illusion(self._tape), self._tape:
            self.module.load_state_dict(tensors, strict=False)

    def _check(self, real: Tensor, tensor: Tensor) -> None:
        assert self._tape is not None
        unwritten = _is_unwritten(real, isinstance(tensor, nn.Parameter))
        if unwritten is None:
            unwritten = torch.full(real.shape, not self._tape.is_written(tensor))
        if not unwritten.any():
            return
        name = self._names[id(tensor)]
        if isinstance(tensor, nn.Parameter):
            raise UserError(
                f"model: {int(unwritten.sum())} of the {real.numel()} numbers of {name} are never "
                "initialised: its constructor leaves them as memory came; give them a value there"
            )
        real[unwritten] = 0
        log.warning("model: %s is not initialised; its %d numbers begin as 0", name, int(unwritten.sum()))


def deferred(build: Callable[[], nn.Module], seed: int) -> Deferred:
    """Run `build` on the meta device; or, where that cannot be, for real.

    What a constructor can do without memory is all that is computed: also `.item()`, given data, tied
    weights and views. What it cannot: write into NumPy arrays, draw from a torch.Generator or seed torch
    itself, make sparse tensors. It is then run again, and builds the whole model; `notes` say why.

    Args:
        build: called once or twice; deterministic but for random generators.
        seed: decides, with the order of the random operations, all numbers that are drawn.
    """
    seed_everything(seed, 0)
    tape = Tape(seed)
    try:
        with _Illusion(tape), tape:
            model = build()
        tape.check_seed()
        for name, tensor in _named_tensors(model):
            if type(tensor) not in _KINDS:
                raise _NotRecordable(f"{name} is a {type(tensor).__name__}")
            if tensor.is_meta and not tape.holds(tensor):
                raise _NotRecordable(f"{name} lies on the meta device")
            if has_gradient_hook(tensor):  # it would stay with the tensor that a real one replaces
                raise _NotRecordable(f"{name} has a hook on its gradient")
        found = Deferred(model, tape)
        found.fill_hidden()
        return found
    except (Exception, _NotRecordable) as error:  # a real mistake comes again, and is reported there
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    seed_everything(seed, 0)
    return Deferred(build(), None, f"the model is built whole on every rank: {reason}")


_OF_MODULES = vars(nn.Module()).keys()  # the attributes that every module has


def has_gradient_hook(tensor: Tensor) -> bool:
    """Whether register_hook or register_post_accumulate_grad_hook was called; torch has no public answer."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers, and tensors that modules hold otherwise, alone or in lists and dicts."""
    for prefix, part in module.named_modules():
        held = {**part._parameters, **part._buffers}
        held |= {key: value for key, value in vars(part).items() if key not in _OF_MODULES}
        for key, value in held.items():
            for tensor in _tensors_in(value, set()):
                yield f"{prefix}.{key}" if prefix else key, tensor


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Of lists, tuples and dicts, which may hold themselves."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item, seen)


def replace_all(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Put what `make` returns in the place of each tensor of `module`; what it returns as it is stays."""
    for tensor in {id(tensor): tensor for _, tensor in _named_tensors(module)}.values():
        if (new := make(tensor)) is not tensor:
            _replace(module, tensor, new)


def _replace(module: nn.Module, old: Tensor, real: Tensor) -> None:
    """Make `old` a real tensor: the same object where it can be, so that all who hold it see it."""
    new = _like(old, real)
    if not weakref.getweakrefs(old):
        with contextlib.suppress(RuntimeError):  # part of an autograd graph, as old-style weight_norm leaves
            torch.utils.swap_tensors(old, new)
            return
    for part in module.modules():  # nn.LSTM and its like keep weak references, and learn of it by setattr
        for name, tensor in [*part._parameters.items(), *part._buffers.items(), *vars(part).items()]:
            if tensor is old:
                setattr(part, name, new)


def _like(old: Tensor, real: Tensor) -> Tensor:
    """`real` as `old` is: a parameter, trained, with attributes of its user's."""
    if isinstance(old, nn.Parameter):
        real = nn.Parameter(real, old.requires_grad)
    elif old.requires_grad and old.is_leaf:
        real.requires_grad_()
    real.__dict__.update(old.__dict__)
    return real


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


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change) for item in value)
    if type(value) is dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    return change(value)


def _mark_unwritten(tensor: Tensor) -> None:
    size = tensor.element_size()
    if tensor.is_complex():
        _mark_unwritten(torch.view_as_real(tensor))
    elif tensor.is_floating_point() and size in _BITS:
        tensor.view(_BITS[size]).fill_(_UNWRITTEN[size])
    elif tensor.is_floating_point():
        tensor.fill_(torch.nan)
    else:
        tensor.zero_()


def _is_unwritten(tensor: Tensor, is_parameter: bool) -> Tensor | None:
    """By element; None where numbers cannot tell.

    A parameter is not to begin as any NaN; and one that was converted has lost the mark, not the NaN.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    if is_parameter:
        return tensor.isnan() if tensor.element_size() > 1 else tensor.float().isnan()
    size = tensor.element_size()
    return tensor.view(_BITS[size]) == _UNWRITTEN[size] if size in _BITS and not tensor.is_complex() else None
