"""Sums of the leaves of all ranks in shards: what a unit of FSDP reduces, as integers."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.comm.leaf_sums import Encoder, decode
from trainer.errors import UserError
from trainer.local_shard import rows_of_shard

Send = Callable[[Tensor, Tensor, dist.ProcessGroup], None]
"""Write the sum of this rank's block of all ranks' messages to the first tensor; the second is a message."""


class ShardSums:
    """Adds the leaves of all ranks for one unit of FSDP, in this rank's shard: 8 bytes an element of it.

    torch is given the sum of all leaves so far as a new gradient, so a unit that the last leaf does not use
    keeps that of the others.

    Args:
        parameters: of the unit, sharded.
        send: the reduce-scatter.
    """

    def __init__(self, name: str, parameters: Sequence[nn.Parameter], encoder: Encoder, send: Send) -> None:
        self._name, self._parameters, self._encoder, self._send = name, parameters, encoder, send
        self._sums: Tensor | None = None

    def reset(self) -> None:
        """Called before the first leaf of a step."""
        if self._sums is not None:
            self._sums.zero_()

    @torch.no_grad()
    def add(self, output: Tensor, gradients: Tensor, group: dist.ProcessGroup) -> None:
        """Add a leaf's `gradients` of the unit, a block for each rank; write this rank's sum to `output`.

        Raises:
            UserError: a leaf used only some parameters of the unit: torch leaves out the others.
        """
        world, numel = dist.get_world_size(group), len(output)
        if self._sums is None:
            self._sums = torch.zeros(numel + 1, dtype=torch.int64, device=output.device)
        if numel != self._num_elements(world):
            raise UserError(
                f"train.exact: a part of the batch used only some parameters of {self._name}, and under "
                "strategy=fsdp a unit's are added as one; use strategy=ddp "
                "strategy.find_unused_parameters=true, or freeze what is never used (model.freeze)"
            )
        message = self._encoder.zeros(world * (numel + 1), output.device).view(world, -1)
        count = torch.zeros_like(self._sums[-1:])
        for to, own in zip(message, gradients.view(world, numel), strict=True):
            self._encoder.add(to[:-1], count, own)
        message[:, -1] = count
        block = torch.empty_like(self._sums)
        self._send(block, message.view(-1), group)
        self._sums += block
        for parameter in self._parameters:
            parameter.grad = None  # else torch would add the new sum to the former
        decode(self._sums[:-1], self._sums[-1], output)

    def _num_elements(self, world: int) -> int:
        """Of the shard, padded as torch does it: the rows of each parameter are cut into equal parts."""
        return sum(rows_of_shard(len(p), 0, world)[1] * math.prod(p.shape[1:]) for p in self._parameters)
