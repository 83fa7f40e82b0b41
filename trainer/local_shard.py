"""This process's shard of a tensor that may be sharded over ranks."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_AS_INTEGERS = {1: torch.int8, 2: torch.int16}


def is_dtensor(value: Any) -> TypeGuard["DTensor"]:
    """Whether it is a DTensor. Does not import that class: that takes a quarter as long as torch."""
    module = sys.modules.get("torch.distributed.tensor")  # if it was not imported, nothing is one
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(value, kind)


def to_local(tensor: Tensor) -> Tensor:
    """The local tensor of `tensor`, detached: all of it, or this rank's shard of a DTensor."""
    if is_dtensor(tensor):
        with torch.no_grad():  # detaching a DTensor takes five times as long
            tensor = tensor.to_local()
    return tensor.detach()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether both have the same dtype, shape and bits; a NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    first, second = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(first, second)


def spanned_bytes(tensor: Tensor) -> int:
    """From the first to the last byte of its elements, with gaps, if any; it must have elements."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.itemsize


def storage_of(tensor: Tensor) -> int:
    """The number of the tensor's storage: an address."""
    return tensor.untyped_storage()._cdata


def num_rows(shape: Sequence[int]) -> int:
    """The size of the first dimension; 1 for a scalar."""
    return shape[0] if shape else 1


def rows_of_shard(num_rows: int, shard: int, num_shards: int) -> tuple[int, int]:
    """The rows [begin, end) of a shard, cut as by torch.chunk and DTensor: the last ones may be empty."""
    each = -(-num_rows // num_shards)
    return min(shard * each, num_rows), min((shard + 1) * each, num_rows)


def is_sharded(tensor: Tensor) -> bool:
    """Whether ranks hold different rows of it: along its first dimension, over the mesh's last."""
    if not is_dtensor(tensor):
        return False
    *copies, placement = tensor.placements
    assert all(copy.is_replicate() for copy in copies), tensor.placements
    assert placement.is_replicate() or placement.is_shard(0), tensor.placements
    return placement.is_shard(0)


def own_rows(tensor: Tensor) -> tuple[int, int]:
    """The rows [begin, end) of `tensor` that this process holds: all, or those of its shard."""
    rows = num_rows(tensor.shape)
    if not is_dtensor(tensor) or not is_sharded(tensor):
        return 0, rows
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return rows_of_shard(rows, coordinate[-1], tensor.device_mesh.size(-1))


def other_bits(one: Tensor, other: Tensor) -> Tensor:
    """Whether any bit differs, as a bool scalar; as integers, since a NaN differs from itself."""
    lanes = _AS_INTEGERS.get(one.itemsize, torch.int32)
    return (one.view(lanes) != other.view(lanes)).any()


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
