"""Gather a sharded tensor on rank 0 shard by shard, so that no rank needs memory for the whole tensor."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.tensors.local_shard import is_dtensor, is_sharded, rows_of_shard, to_local


def gather_shards_to_rank0(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the shards of `tensor` on rank 0, in order and on the CPU (a collective).

    Other ranks get nothing, but must exhaust the iterator, too. A tensor that is not sharded is a single
    shard, which rank 0 already has.

    Args:
        tensor: a tensor, or a DTensor created by fully_shard: sharded along its first dimension, over the
            last dimension of the mesh.
    """
    local, rank = to_local(tensor), dist.get_rank()
    if not is_dtensor(tensor) or not is_sharded(tensor):
        if rank == 0:
            yield local.cpu()
        return
    device = tensor.device_mesh.device_type  # CPU offload keeps shards where its backend can't send
    # Each group has a copy; the first group includes rank 0.
    holders = tensor.device_mesh.mesh.flatten()[: tensor.device_mesh.size(-1)].tolist()
    if rank != 0:
        if rank in holders and local.numel():
            dist.send(local.to(device), dst=0)
        return
    for number, holder in enumerate(holders):
        begin, end = rows_of_shard(len(tensor), number, len(holders))
        shape = torch.Size((end - begin, *tensor.shape[1:]))
        if holder == 0:
            yield local.cpu()
        elif shape.numel():
            shard = torch.empty(shape, dtype=tensor.dtype, device=device)
            dist.recv(shard, src=holder)
            yield shard.cpu()
