"""The operations on tensors without memory, in order; and their replay on real memory."""

import bisect
import heapq
import itertools
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.errors import UserError
from trainer.meta_init.unwritten import mark_unwritten
from trainer.nested import leaves, mapped

_aten = torch.ops.aten
# These overwrite all of their first argument without reading it.
OVERWRITES = {
    _aten.uniform_.default,
    _aten.normal_.default,
    _aten.zero_.default,
    _aten.fill_.Scalar,
    _aten.copy_.default,
}
_RESIZES = {_aten.resize_.default}


@dataclass(frozen=True, slots=True)
class StorageSlice:
    """The place of a tensor in its memory, which is known by the number of its storage."""

    storage: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> "StorageSlice":
        offset = int(tensor.storage_offset())
        return StorageSlice(storage_of(tensor), tensor.size(), tensor.stride(), offset, tensor.dtype)

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor with data, from a file or a list, as it was when it was used."""

    tensor: Tensor
    checksum: int | None  # None if no other code can write to it

    def is_as_it_was(self) -> bool:
        """Whether the data is unchanged; torch does not count writes by NumPy or to `.data`."""
        return self.checksum is None or checksum(self.tensor) == self.checksum

    def get(self) -> Tensor:
        if not self.is_as_it_was():
            raise UserError(
                f"model: a tensor of shape {tuple(self.tensor.shape)} from which others are initialised was "
                "changed since the model was built; do not change it, or initialise them from a copy"
            )
        return self.tensor


@dataclass(frozen=True, slots=True)
class Operation:
    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    outputs: list[StorageSlice | None]  # of new tensors; None for the others
    reads: set[int]
    writes: set[int]
    seed: int | None


class Operations:
    """The recorded operations, and the storages that they use, by number."""

    def __init__(self) -> None:
        self._done: list[Operation] = []
        self._writers: dict[int, list[int]] = defaultdict(list)  # by storage, indices into that list
        # Kept alive, so that no address is used twice; meta storages are empty.
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __iter__(self) -> Iterator[Operation]:
        return iter(self._done)

    def append(self, operation: Operation) -> None:
        for number in operation.writes:
            self._writers[number].append(len(self._done))
        self._done.append(operation)

    def real(self, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor with its real counterpart, replayed for about a MB at a time."""
        by_storage: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            by_storage.setdefault(storage_of(tensor), []).append(tensor)
        ends = itertools.accumulate(self.storages[number].nbytes() for number in by_storage)
        for _, batch in itertools.groupby(zip(ends, by_storage, strict=True), lambda pair: pair[0] >> 20):
            for number, storage in self.replay({number for _, number in batch}).items():
                for tensor in by_storage[number]:
                    yield tensor, StorageSlice.of(tensor).on(storage)

    def replay(self, storages: set[int]) -> dict[int, torch.UntypedStorage]:
        """Create and fill the memory of these storages, by number."""
        chosen = self._needed_for(storages)
        made: dict[int, torch.UntypedStorage] = {}
        last_use = {number: index for index, op in enumerate(chosen) for number in op.reads | op.writes}
        before = torch.get_rng_state()
        with torch.no_grad():
            for index, operation in enumerate(chosen):
                self._redo(operation, made)
                for number in operation.reads | operation.writes:
                    if last_use[number] == index and number not in storages:
                        made.pop(number, None)
        torch.set_rng_state(before)
        return made

    def _needed_for(self, storages: set[int]) -> list[Operation]:
        """The operations on which the contents of these storages depend, in order."""
        needed, chosen = set(storages), dict[int, Operation]()
        waiting: list[int] = []  # a heap of the operations to visit, the last first, as negative numbers

        def look_at_writers(numbers: set[int], before: int) -> None:
            for writers in (self._writers[number] for number in numbers):
                if earlier := bisect.bisect_left(writers, before):
                    heapq.heappush(waiting, -writers[earlier - 1])

        look_at_writers(needed, len(self._done))
        while waiting:
            index = -heapq.heappop(waiting)
            operation = self._done[index]
            if index in chosen or needed.isdisjoint(operation.writes):
                continue
            chosen[index] = operation
            if operation.function in OVERWRITES and self._covers(operation.arguments[0]):
                needed -= operation.writes  # its earlier contents are not needed
            needed |= operation.reads
            look_at_writers(needed & (operation.reads | operation.writes), index)
        return list(reversed(chosen.values()))

    def is_written(self, tensor: Tensor) -> bool:
        """Whether any operation wrote to the memory of `tensor` after its allocation."""
        writers = [self._done[index] for index in self._writers[storage_of(tensor)]]
        return not all("empty" in op.function.name() or op.function in _RESIZES for op in writers)

    def _covers(self, place: StorageSlice) -> bool:
        """Whether a tensor covers all of its memory."""
        dense = place.size.numel() * place.dtype.itemsize == self.storages[place.storage].nbytes()
        return dense and 0 not in place.stride

    def _redo(self, operation: Operation, made: dict[int, torch.UntypedStorage]) -> None:
        def real(value: Any) -> Any:
            if isinstance(value, Given):
                return value.get()
            if not isinstance(value, StorageSlice):
                return value
            if value.storage not in made:  # it is overwritten next, so it was not created
                made[value.storage] = torch.UntypedStorage(self.storages[value.storage].nbytes())
            return value.on(made[value.storage])

        if operation.seed is not None:
            torch.default_generator.manual_seed(operation.seed)
        arguments, options = mapped((operation.arguments, operation.options), real)
        before = arguments[0].untyped_storage().nbytes() if operation.function in _RESIZES else 0
        result = operation.function(*arguments, **options)
        if operation.function in _RESIZES and (grown := result.untyped_storage().nbytes()) > before:
            of_all = torch.empty(0, dtype=result.dtype).set_(result.untyped_storage())
            mark_unwritten(of_all[before // result.itemsize : grown // result.itemsize])
        tensors = [value for value in leaves(result) if isinstance(value, Tensor)]
        for tensor, place in zip(tensors, operation.outputs, strict=True):
            if place is None:
                continue
            if (tensor.size(), tensor.stride(), tensor.storage_offset()) != (place.size, place.stride, 0):
                tensor = torch.empty_strided(place.size, place.stride, dtype=place.dtype).copy_(tensor)
            if "empty" in operation.function.name():
                mark_unwritten(tensor)
            made[place.storage] = tensor.untyped_storage()


def checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)


def storage_of(tensor: Tensor) -> int:
    """The number of the tensor's storage: an address."""
    return tensor.untyped_storage()._cdata
