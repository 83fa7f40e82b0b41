"""Collectives with simpler arguments than torch's."""

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

_TOGETHER_BYTES = 1 << 24
_RENAMED = hasattr(dist, "all_gather_single")  # torch 2.14 warns of the former names
_BACKSTOP_S = 3600.0


def backstop(timeout_s: float) -> timedelta:
    """The time-out of a group of torch's, beyond `timeout_s`, at which the watch ends a run and says why.

    NCCL's watchdog would abort first and name nobody. And torch counts time in which a job was suspended.
    """
    return timedelta(seconds=timeout_s + _BACKSTOP_S)


def gloo_group(timeout_s: float, in_time: bool = False) -> dist.ProcessGroup:
    """A gloo group of all ranks, created by every rank (a collective).

    Args:
        in_time: whether its operations fail after `timeout_s` themselves, and leave nothing to the watch.
    """
    timeout = timedelta(seconds=timeout_s) if in_time else backstop(timeout_s)
    with connecting():
        return cast(dist.ProcessGroup, dist.new_group(None, timeout, "gloo"))


def all_gather_single(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Fill `output` with every rank's `input`, in the order of ranks."""
    gather = dist.all_gather_single if _RENAMED else dist.all_gather_into_tensor
    gather(output, input, group=group)


def reduce_scatter_single(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill `output` with the sum over ranks of this rank's part of `input`."""
    scatter = dist.reduce_scatter_single if _RENAMED else dist.reduce_scatter_tensor
    scatter(output, input, group=group)


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[torch.Tensor], src: int) -> None:
    """Copy the values of `tensors` from rank `src` to every rank (a collective).

    Sends bytes, since neither gloo nor NCCL broadcasts int16, uint16 or float8; packs small tensors. Does
    not send sparse tensors.
    """
    dense = (tensor for tensor in tensors if tensor.layout == torch.strided)
    tensors = sorted(dense, key=lambda tensor: -tensor.itemsize)  # aligns each part to its dtype
    ends = accumulate(tensor.nbytes for tensor in tensors)
    places = [(tensor.device, end // _TOGETHER_BYTES) for tensor, end in zip(tensors, ends, strict=True)]
    for _, numbers in groupby(range(len(tensors)), key=places.__getitem__):
        together = [tensors[number] for number in numbers]
        message = torch.cat([bytes_of(tensor) for tensor in together])
        dist.broadcast(message, src)
        parts = zip(together, message.split([tensor.nbytes for tensor in together]), strict=True)
        for _, alike in groupby(parts, key=lambda pair: pair[0].dtype):  # of one dtype: copied by one kernel
            pairs = [(own, part.view(own.dtype).view(own.shape)) for own, part in alike]
            foreach_copy([own for own, _ in pairs], [value for _, value in pairs])


def broadcast_buffers(module: nn.Module, src: int) -> None:
    """`broadcast_tensors` by name: ranks whose forward passes make buffers may do so in another order."""
    if buffers := sorted(module.named_buffers(), key=itemgetter(0)):
        broadcast_tensors((buffer for _, buffer in buffers), src)


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sum `values` in place over all ranks (a collective) and return it."""
    dist.all_reduce(values)
    return values
