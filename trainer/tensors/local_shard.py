"""This process's shard of a tensor that may be sharded over ranks."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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


def tensors_within(tensor: Tensor) -> dict[str, Tensor]:
    """The plain tensors, by name, that hold one of a class with several in one; of any other none.

    An 8-bit optimizer keeps its state as such. The class has the two methods that torch.compile asks for.
    """
    if is_dtensor(tensor) or not hasattr(tensor, "__tensor_flatten__"):
        return {}
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


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
