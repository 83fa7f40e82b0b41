"""Sums of gradients over the chunks of all ranks, as integers, for the sharded units of FSDP."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainer.distributed.collectives import reduce_scatter_single
from trainer.errors import UserError
from trainer.exact.chunk_sums import Encoder, decode
from trainer.exact.sum_checks import NO_CHECKS, SumChecks
from trainer.tensors.local_shard import rows_of_shard


def add_by_chunks(model: nn.Module, num_chunks: int, checks: SumChecks = NO_CHECKS) -> list["ShardSums"]:
    """Make FSDP add the gradients of each unit of `model` as integers.

    `fully_shard` must have been applied to the model and its units; hybrid sharding is not supported.
    """
    encoder, all_sums = Encoder(num_chunks), []
    for name, unit in units_of(model):
        parameters = dict.fromkeys(getattr(part, attribute) for part, attribute in own_parameters(unit))
        all_sums.append(ShardSums(name, list(parameters), encoder, checks))
        module: Any = unit
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_reduce_scatter(all_sums[-1])
    return all_sums


def units_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the name and the module of each unit."""
    units = [(name, part) for name, part in model.named_modules() if isinstance(part, FSDPModule)]
    return [(f"unit {name}" if name else "the root", cast(nn.Module, part)) for name, part in units]


def own_parameters(unit: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the module and the attribute name of each of a unit's own parameters, in torch's order."""
    nested = {
        m
        for child in unit.modules()
        if child is not unit and isinstance(child, FSDPModule)
        for m in child.modules()
    }
    own = [module for module in unit.modules() if module not in nested]
    return [(part, name) for part in own for name, _ in part.named_parameters(recurse=False)]


class ShardSums:
    """Sums of gradients over the chunks of all ranks, for this rank's shard of one unit of FSDP.

    They take 8 bytes of memory per element of the shard. The class has the methods of torch's ReduceScatter,
    whose base class is not public. Its output, the gradient that torch sets, is the sum of all chunks so far,
    so a unit that the last chunk does not use keeps the sum of earlier chunks.
    """

    def __init__(
        self, name: str, parameters: Sequence[nn.Parameter], encoder: Encoder, checks: SumChecks = NO_CHECKS
    ) -> None:
        self._name, self._parameters, self._encoder, self._checks = name, parameters, encoder, checks
        self._sums: Tensor | None = None

    def reset(self) -> None:
        """Clear the sums; called before the first chunk of a step."""
        if self._sums is not None:
            self._sums.zero_()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for gradients; called by torch."""
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
        """Add a chunk's gradients of the unit, and write the sum of this rank's shard to the output.

        Args:
            output_tensor: (numel,), the sum of this rank's shard.
            input_tensor: (ranks * numel,), a block for each rank.
        """
        world, numel, device = dist.get_world_size(group), len(output_tensor), output_tensor.device
        if numel != self._num_elements(world):
            raise UserError(
                f"train.exact: a chunk used only some parameters of {self._name}, but strategy=fsdp reduces "
                "all gradients of a unit together; use strategy=ddp strategy.find_unused_parameters=true, or "
                "freeze parameters that are never used (model.freeze)"
            )
        if self._sums is None or len(self._sums) != numel + 1:  # the trainable parameters of the unit changed
            self._sums = torch.zeros(numel + 1, dtype=torch.int64, device=device)
        message = self._encoder.zeros(world * (numel + 1), device).view(world, -1)
        count = torch.zeros_like(self._sums[-1:])
        with self._checks.adding(lambda: self._segments(message, world)):
            for row, block in zip(message, input_tensor.view(world, numel), strict=True):
                self._encoder.add(row[:-1], count, block)
        message[:, -1] = count
        self._checks.sent(message)
        received = torch.empty_like(self._sums)
        reduce_scatter_single(received, message.view(-1), group)
        self._checks.received(received)
        self._sums += received
        for parameter in self._parameters:
            parameter.grad = None  # otherwise, torch would add the new sum to the previous one
        decode(self._sums[:-1], self._sums[-1], output_tensor)

    def _num_elements(self, world: int) -> int:
        """Return the size of the shard, including torch's padding, which makes all shards equal."""
        return sum(self._sizes(world).values())

    def _sizes(self, world: int) -> dict[nn.Parameter, int]:
        trainable = [parameter for parameter in self._parameters if parameter.requires_grad]
        return {p: rows_of_shard(len(p), 0, world)[1] * math.prod(p.shape[1:]) for p in trainable}

    def _segments(self, message: Tensor, world: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
        sizes = self._sizes(world)
        return zip(sizes, message[:, :-1].split(list(sizes.values()), 1), strict=True)
