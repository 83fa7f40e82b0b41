"""Collectives whose parts are one tensor: torch 2.14 renamed them, and warns of the former names."""

import torch.distributed as dist
from torch import Tensor

_RENAMED = hasattr(dist, "all_gather_single")


def all_gather_single(output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill `output` with every rank's `input`, in the order of ranks."""
    gather = dist.all_gather_single if _RENAMED else dist.all_gather_into_tensor
    gather(output, input, group=group)


def reduce_scatter_single(output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill `output` with the sum over ranks of this rank's part of `input`."""
    scatter = dist.reduce_scatter_single if _RENAMED else dist.reduce_scatter_tensor
    scatter(output, input, group=group)
