"""This process's shard of a tensor that may be sharded over ranks."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

_AS_INTEGERS = {1: torch.int8, 2: torch.int16}


def to_local(tensor: Tensor) -> Tensor:
    """The local tensor of `tensor`, detached: all of it, or this rank's shard of a DTensor."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():  # detaching a DTensor takes five times as long
            tensor = tensor.to_local()
    return tensor.detach()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether both have the same dtype, shape and bits; a NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    first, second = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(first, second)


def local_shard(full: Tensor, sharded: DTensor) -> Tensor:
    """This process's shard of `sharded`, as a view of `full`: of a mapped file the rest is never read."""
    *copies, placement = sharded.placements
    assert all(copy == Replicate() for copy in copies), sharded.placements
    if placement == Replicate():
        return full
    assert placement == Shard(0), sharded.placements
    mesh = sharded.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # the mesh has only other ranks, such as parameter servers
        return sharded.to_local()
    index, shards = coordinate[-1], full.chunk(mesh.size(-1))
    return shards[index] if index < len(shards) else full[:0]


def other_bits(one: Tensor, other: Tensor) -> Tensor:
    """Whether any bit differs, as a bool scalar; as integers, since a NaN differs from itself."""
    lanes = _AS_INTEGERS.get(one.itemsize, torch.int32)
    return (one.view(lanes) != other.view(lanes)).any()
