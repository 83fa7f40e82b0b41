"""Simulation of other ranks, tensors without values, and the attention kernels of GPUs, for a dry run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from planner.ledger import parts
from planner.simulated import CPU, PlacedStrategy
from trainer.distributed.ranks import Ranks
from trainer.strategies.meta_init import InitialModel, named_tensors, replace
from trainer.tensors.nested import leaves, mapped
from trainer.torch_private import fake_store, is_fake


@dataclass(frozen=True)
class DryRunWorld:
    """The world of the run, and the rank to simulate.

    `per_host` is the number of ranks per host, or for strategies that use one process, its number of GPUs.
    """

    size: int
    per_host: int
    rank: int = 0


@contextmanager
def as_rank_of(world: DryRunWorld) -> Iterator[Ranks]:
    """Initialize a fake process group, and yield the ranks of `world`."""
    dist.init_process_group("fake", rank=world.rank, world_size=world.size, store=fake_store())
    try:
        hosts = tuple(rank // world.per_host for rank in range(world.size))
        local = min(world.per_host, world.size)
        yield Ranks(world.rank, world.rank % world.per_host, world.size, local, hosts, CPU, "fake")
    finally:
        dist.destroy_process_group()


def without_values(model: InitialModel, placed: PlacedStrategy) -> InitialModel:
    """Replace the initial values of `model` with fake tensors, and return `model`."""
    # Read outside the fake mode, in which every sparse tensor is empty.
    sparse = {id(t): parts(t) for _, t in named_tensors(model.module) if t.layout != torch.strided}

    def fake(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor) or is_fake(tensor):
            return tensor
        device = placed.device
        if tensor.layout == torch.strided:
            return torch.empty_like(tensor, device=device)
        fakes = [torch.empty(part.shape, dtype=part.dtype, device=device) for part in sparse[id(tensor)]]
        if tensor.layout == torch.sparse_coo:
            indices, values = fakes
            return torch.sparse_coo_tensor(indices, values, tensor.shape, is_coalesced=tensor.is_coalesced())
        outer, inner, values = fakes
        return torch.sparse_compressed_tensor(outer, inner, values, tensor.shape, layout=tensor.layout)

    def fill(module: nn.Module) -> None:
        tensors = {id(tensor): tensor for _, tensor in named_tensors(module)}
        replace(module, ((old, new) for old in tensors.values() if (new := fake(old)) is not old))

    model.fill = fill  # type: ignore[method-assign]
    return model


def repeated(one: Any, two: Any, size: int) -> Any:
    """Return a batch of `size` samples as fake tensors, given batches of one and of two samples.

    The batch dimension is the one that is twice as large in `two`, or the first if the structures differ.
    """
    pairs = {id(leaf): leaf for leaf in leaves(one)}
    if len(pairs) == len(leaves_of_two := leaves(two)):
        pairs = dict(zip(pairs, leaves_of_two, strict=True))

    def enlarged(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        larger = pairs[id(value)]
        shape, batch_dim = list(value.shape), 0 if larger is value else None
        if batch_dim is None and larger.ndim == value.ndim:
            batch_dim = next((dim for dim, n in enumerate(shape) if larger.shape[dim] == 2 * n), None)
        if batch_dim is not None:
            shape[batch_dim] *= size
        return torch.empty(shape, dtype=value.dtype, device=CPU)

    return mapped(one, enlarged)


class FusedAttention(TorchFunctionMode):
    """Disables dropout in attention. With dropout, a CPU would store all scores, which GPU kernels do not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p")
            kwargs = {**dict(zip(names, args, strict=False)), **kwargs, "dropout_p": 0.0}
            args = ()
        return func(*args, **kwargs)
