"""Sums of the chunks of all ranks in shards: what a unit of FSDP reduces, as integers."""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainer.distributed.collectives import reduce_scatter_single
from trainer.errors import UserError
from trainer.exact.chunk_sums import Encoder, decode
from trainer.tensors.local_shard import rows_of_shard


def add_by_chunks(model: nn.Module, num_chunks: int) -> list["ShardSums"]:
    """Have the gradients of each unit of `model` added as integers.

    Args:
        model: on which `fully_shard` has been called, with all its units, over several ranks; not hybrid.
    """
    encoder, all_sums = Encoder(num_chunks), []
    for name, unit in units_of(model):
        parameters = {getattr(part, of) for part, of in own_parameters(unit)}
        all_sums.append(ShardSums(name, list(parameters), encoder))
        module: Any = unit
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_reduce_scatter(all_sums[-1])
    return all_sums


def units_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The name for users and the module of each unit."""
    units = [(name, part) for name, part in model.named_modules() if isinstance(part, FSDPModule)]
    return [(f"unit {name}" if name else "the root", cast(nn.Module, part)) for name, part in units]


def own_parameters(unit: nn.Module) -> list[tuple[nn.Module, str]]:
    """The module and the name there of each parameter of a unit, without those of units within."""
    within = [
        m
        for child in unit.modules()
        if child is not unit and isinstance(child, FSDPModule)
        for m in child.modules()
    ]
    own = set(unit.modules()) - set(within)
    return [(part, name) for part in own for name, _ in part.named_parameters(recurse=False)]


class ShardSums:
    """Adds the chunks of all ranks for one unit of FSDP, in this rank's shard: 8 bytes an element of it.

    It has the methods of torch's ReduceScatter, whose base class is not public.

    torch is given the sum of all chunks so far as a new gradient, so a unit that the last chunk does not use
    keeps that of the others.

    Args:
        parameters: of the unit, sharded; each chunk uses all that require gradients.
    """

    def __init__(self, name: str, parameters: Sequence[nn.Parameter], encoder: Encoder) -> None:
        self._name, self._parameters, self._encoder = name, parameters, encoder
        self._sums: Tensor | None = None

    def reset(self) -> None:
        """Called before the first chunk of a step."""
        if self._sums is not None:
            self._sums.zero_()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the gradients; torch decides how long it lives."""
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Add a chunk's gradients of the unit, a block for each rank; write this rank's sum to the output.

        Raises:
            UserError: a chunk used only some parameters of the unit: torch leaves out the others.
        """
        world, numel, device = dist.get_world_size(group), len(output_tensor), output_tensor.device
        if numel != self._num_elements(world):
            raise UserError(
                f"train.exact: a part of the batch used only some parameters of {self._name}, and under "
                "strategy=fsdp a unit's are added as one; use strategy=ddp "
                "strategy.find_unused_parameters=true, or freeze what is never used (model.freeze)"
            )
        if self._sums is None or len(self._sums) != numel + 1:  # a step trains other parameters of the unit
            self._sums = torch.zeros(numel + 1, dtype=torch.int64, device=device)
        message = self._encoder.zeros(world * (numel + 1), device).view(world, -1)
        count = torch.zeros_like(self._sums[-1:])
        for to, own in zip(message, input_tensor.view(world, numel), strict=True):
            self._encoder.add(to[:-1], count, own)
        message[:, -1] = count
        block = torch.empty_like(self._sums)
        reduce_scatter_single(block, message.view(-1), group)
        self._sums += block
        for parameter in self._parameters:
            parameter.grad = None  # else torch would add the new sum to the former
        decode(self._sums[:-1], self._sums[-1], output_tensor)

    def _num_elements(self, world: int) -> int:
        """Of the shard, padded as torch does it: the rows of each parameter are cut into equal parts."""
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        return sum(rows_of_shard(len(p), 0, world)[1] * math.prod(p.shape[1:]) for p in trained)
