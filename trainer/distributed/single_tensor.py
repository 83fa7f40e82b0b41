"""Collectives whose parts are one tensor: torch 2.14 renamed them, and warns of the former names."""

import torch.distributed as dist
from torch import Tensor


def all_gather_single(output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill `output` with every rank's `input`, in the order of ranks."""
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(output, input, group=group)


def reduce_scatter_single(output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill `output` with the sum over ranks of this rank's part of `input`."""
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(output, input, group=group)
