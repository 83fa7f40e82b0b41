"""A tensor that is sharded over the ranks, brought to rank 0 piece by piece: no rank ever holds it whole."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard


def pieces(
    tensor: Tensor, device: torch.device | str, group: dist.ProcessGroup | None = None
) -> Iterator[Tensor]:
    """Yield on rank 0 the parts of `tensor` along its first dimension, in order and on the CPU.

    Collective over `group`, to the end: other ranks are given nothing, and must exhaust the iterator all the
    same. A tensor that is not sharded is one piece, which rank 0 has already. Costs rank 0 the memory of the
    largest shard.

    Args:
        tensor: a tensor, or a DTensor as fully_shard makes them: by its first dimension, over the last of the
            mesh's dimensions.
        device: where `group` can reach; None as group is all ranks.
    """
    tensor, rank = tensor.detach(), dist.get_rank()
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not isinstance(tensor, DTensor) or all(placement == Replicate() for placement in tensor.placements):
        if rank == 0:
            yield local.cpu()
        return
    *copies, placement = tensor.placements
    assert placement == Shard(0) and all(copy == Replicate() for copy in copies), tensor.placements
    # Of the groups that hold a copy each, the first has rank 0 in it.
    holders = tensor.device_mesh.mesh.flatten()[: tensor.device_mesh.size(-1)].tolist()
    if rank != 0:
        if rank in holders and local.numel():
            dist.send(local.to(device), dst=0, group=group)
        return
    shapes = [part.shape for part in torch.empty(tensor.shape, device="meta").chunk(len(holders))]
    for holder, shape in zip(holders, shapes, strict=False):  # the last holders may have nothing
        if holder == 0:
            yield local.cpu()
        elif shape.numel():
            piece = torch.empty(shape, dtype=tensor.dtype, device=device)
            dist.recv(piece, src=holder, group=group)
            yield piece.cpu()


def own_piece(whole: Tensor, sharded: DTensor) -> Tensor:
    """What this process holds of `sharded`, as a view of `whole`: of a mapped file the rest is never read."""
    *copies, placement = sharded.placements
    assert all(copy == Replicate() for copy in copies), sharded.placements
    if placement == Replicate():
        return whole
    assert placement == Shard(0), sharded.placements
    mesh = sharded.device_mesh
    place = mesh.get_coordinate()
    if place is None:  # the mesh is of other ranks: of parameter servers, say
        return sharded.to_local()
    index, parts = place[-1], whole.chunk(mesh.size(-1))
    return parts[index] if index < len(parts) else whole[:0]


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a CPU tensor; a copy, should it not be contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
