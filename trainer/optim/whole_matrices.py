"""Muon for sharded matrices: each is gathered for its update, which needs all of it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Muon

from trainer.local_shard import to_local

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_MOMENTUM = "momentum_buffer"  # the key of Muon's state


class WholeMatrices(Muon):
    """Muon's steps on whole matrices, whose shards, and those of their momentum, stay where they are.

    Of as many matrices as there are shards each rank updates one: it receives the shards of weight, momentum
    and gradient, takes torch's own step, and sends weight and momentum back. So each update is computed once.
    A rank needs the memory of some whole matrices, and sends and receives 5 times its shards.

    Args:
        muon: new, of matrices that are sharded over the same ranks. Its groups become those of this one.
    """

    def __init__(self, muon: Muon) -> None:
        super().__init__(muon.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """(A collective of the ranks of the shards.)"""
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for dtype in dict.fromkeys(parameter.dtype for parameter in trained):
                matrices = [parameter for parameter in trained if parameter.dtype == dtype]
                num_shards = matrices[0].device_mesh.size(-1)
                for first in range(0, len(matrices), num_shards):
                    self._update(group, matrices[first : first + num_shards])

    def _update(self, group: dict[str, Any], matrices: Sequence["DTensor"]) -> None:
        """Update at most as many matrices as there are shards: rank r computes that of number r."""
        mesh = matrices[0].device_mesh
        last = mesh.ndim - 1
        ranks, rank, num_shards = mesh.get_group(last), mesh.get_local_rank(last), mesh.size(last)
        held = [self._held(matrix) for matrix in matrices]
        # (weight and momentum and gradient, rows, columns), with as many rows as the longest shard.
        packed = [
            F.pad(torch.stack(parts), (0, 0, 0, -(-matrix.shape[0] // num_shards) - len(parts[0])))
            for matrix, parts in zip(matrices, held, strict=True)
        ]
        nothing = packed[0].new_empty(0)
        packed += [nothing] * (num_shards - len(matrices))
        received = _exchanged(packed, [packed[rank].shape] * num_shards, ranks)
        updated = [nothing] * num_shards
        if rank < len(matrices):
            whole = torch.cat(received, dim=1)
            _step(group, *whole[:, : matrices[rank].shape[0]])
            updated = list(whole[:2].chunk(num_shards, dim=1))
        received = _exchanged(updated, [part[:2].shape for part in packed], ranks)
        for parts, pair in zip(held, received, strict=False):
            for own, new in zip(parts, pair, strict=False):
                own.copy_(new[: len(own)])

    def _held(self, matrix: "DTensor") -> tuple[Tensor, Tensor, Tensor]:
        """This rank's rows of the weight, its momentum and its gradient."""
        state = self.state[matrix]
        if _MOMENTUM not in state:
            state[_MOMENTUM] = torch.zeros_like(matrix)  # as Muon begins
        assert matrix.grad is not None
        return to_local(matrix), to_local(state[_MOMENTUM]), to_local(matrix.grad)


def _step(group: dict[str, Any], weight: Tensor, momentum: Tensor, gradient: Tensor) -> None:
    """Update weight and momentum in place by a step of Muon with the options of `group`."""
    parameter = nn.Parameter(weight)
    parameter.grad = gradient
    muon = Muon([{**group, "params": [parameter]}])
    muon.state[parameter][_MOMENTUM] = momentum
    muon.step()


def _exchanged(
    sent: Sequence[Tensor], shapes: Sequence[torch.Size], ranks: dist.ProcessGroup
) -> list[Tensor]:
    """Send each rank its tensor, and return what each sent here, of these shapes (a collective)."""
    sizes = [shape.numel() for shape in shapes]
    received = sent[0].new_empty(sum(sizes))
    message = torch.cat([part.reshape(-1) for part in sent])
    dist.all_to_all_single(received, message, sizes, [part.numel() for part in sent], group=ranks)
    return [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]
