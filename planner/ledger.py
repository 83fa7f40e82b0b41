"""Count the memory of tensors while code runs, for example with fake tensors."""

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.tensors.local_shard import to_local
from trainer.tensors.nested import leaves
from trainer.torch_private import TorchDispatchMode

KINDS = ("parameters", "gradients", "optimizer", "averages", "communication", "activations")
_REST, _COMMUNICATION = "activations", "communication"


class _Record:
    """A storage: its device, its current size in bytes, and its kind."""

    __slots__ = ("device", "kind", "num_bytes", "storage")

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        self.storage = weakref.ref(tensor.untyped_storage())
        self.num_bytes = 0
        self.kind = _REST


class Account:
    """The memory of one device.

    The kind of a storage may be set at any time, even after it was freed, because the peak is divided into
    kinds only at the end.

    Attributes:
        peak_bytes: the maximum so far.
        live_bytes: the current number of bytes.
    """

    def __init__(self) -> None:
        self.peak_bytes = self.live_bytes = 0
        self._changes: list[tuple[_Record, int]] = []
        self._length_at_peak = 0

    def add(self, record: _Record, change: int) -> None:
        self._changes.append((record, change))
        self.live_bytes += change
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self._length_at_peak = self.live_bytes, len(self._changes)

    def peak(self) -> dict[str, int]:
        """Return the bytes of each kind at the peak."""
        totals: Counter[str] = Counter()
        for record, change in self._changes[: self._length_at_peak]:
            totals[record.kind] += change
        return {kind: totals[kind] for kind in KINDS}

    def forget_peak(self) -> None:
        """Set the peak to the current number of bytes."""
        self.peak_bytes, self._length_at_peak = self.live_bytes, len(self._changes)


class MemoryLedger(TorchDispatchMode):
    """A mode that counts the bytes of every tensor that an operation creates, until it is freed.

    Enter it inside a FakeTensorMode.

    Attributes:
        accounts: the account of each device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.accounts: defaultdict[torch.device, Account] = defaultdict(Account)
        self._records: dict[int, _Record] = {}  # by the address of the storage
        # Storages that FSDP frees by resize_, which is not an operation, and fills again by an operation.
        self._resized: dict[int, _Record] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls again, with its local tensors
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim" or isinstance(result, int | float | bool):
            return result
        for address, record in list(self._resized.items()):
            self._settle(record)
            if not record.num_bytes:
                self._resized.pop(address, None)
        for tensor in _tensors(result):
            self._see(tensor)
        if func.namespace in ("c10d", "fsdp", "_c10d_functional"):
            self._communicate(func, args, kwargs)
        return result

    def name(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Set the kind of `tensors`, or, for DTensors, of their local shards."""
        for tensor in tensors:
            for part in parts(to_local(tensor)):
                self._see(part).kind = kind

    def forget_peaks(self) -> None:
        for account in self.accounts.values():
            account.forget_peak()

    def _see(self, tensor: Tensor) -> _Record:
        storage = tensor.untyped_storage()
        address = id(storage)
        record = self._records.get(address)
        if record is None or record.storage() is not storage:
            record = self._records[address] = _Record(tensor)
            weakref.finalize(storage, self._freed, record, address).atexit = False
        self._settle(record)
        return record

    def _settle(self, record: _Record) -> None:
        storage = record.storage()
        num_bytes = 0 if storage is None else storage.nbytes()
        if num_bytes != record.num_bytes:
            self._change(record, num_bytes)

    def _change(self, record: _Record, num_bytes: int) -> None:
        change, record.num_bytes = num_bytes - record.num_bytes, num_bytes
        self.accounts[record.device].add(record, change)

    def _freed(self, record: _Record, address: int) -> None:
        if record.num_bytes:
            self._change(record, 0)
        if self._records.get(address) is record:
            del self._records[address]
        self._resized.pop(address, None)

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> None:
        """Set the kind of a collective's inputs and outputs to communication, if it is not set."""
        name = func.overloadpacket.__name__
        for tensor in _tensors((args, kwargs)):
            record = self._see(tensor)
            if record.kind in (_REST, _COMMUNICATION):
                record.kind = _COMMUNICATION
                self._resized[id(tensor.untyped_storage())] = record
        if name.startswith("chunk_cat"):  # whole gradients before the reduce-scatter
            self.name("gradients", _tensors(args))
        # Gradients are copied before a reduce-scatter, as gloo does.
        if name == "_reduce_scatter_base_":
            staged = _Record(args[1])
            staged.kind = _COMMUNICATION
            self._change(staged, args[1].nbytes)
            self._change(staged, 0)


def parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that contain the data: `tensor` itself, or indices and values if sparse."""
    if tensor.layout == torch.strided:
        return [tensor]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]  # the public methods need coalesced tensors
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def _tensors(value: Any) -> Iterator[Tensor]:
    for leaf in leaves(value):
        if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
            yield from parts(leaf)
