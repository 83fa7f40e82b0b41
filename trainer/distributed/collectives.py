"""Collectives with simpler signatures than torch's."""

from collections.abc import Iterable
from datetime import timedelta
from itertools import accumulate, groupby
from operator import itemgetter
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from trainer.distributed.shrink import connecting
from trainer.tensors.bits import bytes_of
from trainer.torch_private import foreach_copy

_PACKED_BYTES = 1 << 24
_RENAMED = hasattr(dist, "all_gather_single")  # torch 2.14 deprecates the previous names
_BACKSTOP_S = 3600.0


def backstop(timeout_s: float) -> timedelta:
    """Return a timeout for process groups that is so long that the watch ends the run first.

    Unlike NCCL's watchdog, the watch reports the failed rank, and doesn't count the time during which a job
    was suspended.
    """
    return timedelta(seconds=timeout_s + _BACKSTOP_S)


def gloo_group(timeout_s: float, in_time: bool = False) -> dist.ProcessGroup:
    """Create a gloo group of all ranks (a collective).

    Args:
        in_time: whether operations of the group fail after `timeout_s`. By default, the watch ends the run
            instead.
    """
    timeout = timedelta(seconds=timeout_s) if in_time else backstop(timeout_s)
    with connecting():
        return cast(dist.ProcessGroup, dist.new_group(None, timeout, "gloo"))


def all_gather_single(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Fill `output` with the `input` of every rank, in the order of ranks."""
    gather = dist.all_gather_single if _RENAMED else dist.all_gather_into_tensor
    gather(output, input, group=group)


def reduce_scatter_single(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill `output` with this rank's part of the sum of `input` over ranks."""
    scatter = dist.reduce_scatter_single if _RENAMED else dist.reduce_scatter_tensor
    scatter(output, input, group=group)


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[torch.Tensor], src: int) -> None:
    """Copy the values of `tensors` from rank `src` to every rank (a collective).

    Tensors are sent as bytes, because neither gloo nor NCCL broadcasts int16, uint16 or float8. Small tensors
    are packed into one message. Sparse tensors are not sent.
    """
    dense = (tensor for tensor in tensors if tensor.layout == torch.strided)
    tensors = sorted(dense, key=lambda tensor: -tensor.itemsize)  # aligns each part to its dtype
    ends = accumulate(tensor.nbytes for tensor in tensors)
    messages = [(tensor.device, end // _PACKED_BYTES) for tensor, end in zip(tensors, ends, strict=True)]
    for _, numbers in groupby(range(len(tensors)), key=messages.__getitem__):
        packed = [tensors[number] for number in numbers]
        message = torch.cat([bytes_of(tensor) for tensor in packed])
        dist.broadcast(message, src)
        parts = zip(packed, message.split([tensor.nbytes for tensor in packed]), strict=True)
        for _, same_dtype in groupby(parts, key=lambda pair: pair[0].dtype):  # copied by a single kernel
            pairs = [(own, part.view(own.dtype).view(own.shape)) for own, part in same_dtype]
            foreach_copy([own for own, _ in pairs], [value for _, value in pairs])


def broadcast_buffers(module: nn.Module, src: int) -> None:
    """Broadcast the buffers of `module` from `src`, in the order of names, which is equal on all ranks."""
    if buffers := sorted(module.named_buffers(), key=itemgetter(0)):
        broadcast_tensors((buffer for _, buffer in buffers), src)


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(values)
    return values
