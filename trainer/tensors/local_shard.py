"""Access to this rank's shard of a tensor that may be sharded over ranks."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: Any) -> TypeGuard["DTensor"]:
    """Return whether `value` is a DTensor, without importing that class, which is slow."""
    module = sys.modules.get("torch.distributed.tensor")  # if not imported, there are no DTensors
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(value, kind)


def to_local(tensor: Tensor) -> Tensor:
    """Return the detached local tensor: `tensor` itself or, for a DTensor, this rank's shard."""
    if is_dtensor(tensor):
        with torch.no_grad():  # five times as fast as detaching the DTensor
            tensor = tensor.to_local()
    return tensor.detach()


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors in a tensor subclass, such as the state of an 8-bit optimizer; {} for others."""
    if is_dtensor(tensor) or not hasattr(tensor, "__tensor_flatten__"):
        return {}
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


def spanned_bytes(tensor: Tensor) -> int:
    """Return the number of bytes from the first to the last element of a non-empty tensor, including gaps."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.itemsize


def storage_of(tensor: Tensor) -> int:
    """Return a number that identifies the tensor's storage."""
    return tensor.untyped_storage()._cdata


def num_rows(shape: Sequence[int]) -> int:
    """Return the size of the first dimension; 1 for a scalar."""
    return shape[0] if shape else 1


def rows_of_shard(num_rows: int, shard: int, num_shards: int) -> tuple[int, int]:
    """Return the rows [begin, end) of a shard, which may be empty, in the layout of DTensor."""
    rows_per_shard = -(-num_rows // num_shards)
    return min(shard * rows_per_shard, num_rows), min((shard + 1) * rows_per_shard, num_rows)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether `tensor` is sharded: along its first dimension, over the last mesh dimension."""
    if not is_dtensor(tensor):
        return False
    *copies, placement = tensor.placements
    assert all(copy.is_replicate() for copy in copies), tensor.placements
    assert placement.is_replicate() or placement.is_shard(0), tensor.placements
    return placement.is_shard(0)


def own_rows(tensor: Tensor) -> tuple[int, int]:
    """Return the rows [begin, end) of `tensor` on this rank; all rows if it is not sharded."""
    rows = num_rows(tensor.shape)
    if not is_dtensor(tensor) or not is_sharded(tensor):
        return 0, rows
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return rows_of_shard(rows, coordinate[-1], tensor.device_mesh.size(-1))


def sharded_like(parameter: "DTensor", rows: Tensor) -> Tensor:
    """Return a DTensor whose local shard is `rows` (not copied), sharded like `parameter`."""
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(rows, mesh, placements, shape=parameter.shape, stride=parameter.stride())
