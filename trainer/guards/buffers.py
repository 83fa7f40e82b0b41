"""Compare buffers after forward passes, before rank 0's (or, with train.exact, the mean) replace them."""

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.distributed.ranks import Ranks
from trainer.errors import UserError, first_few
from trainer.model.plain_names import places_of_buffers
from trainer.strategies.sharding import BATCH_NORMS
from trainer.tensors.bits import bit_hashes

log = logging.getLogger(__name__)
# In training, forward doesn't read their running statistics.
_NORMS = (*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

_OF_RANKS = (
    "on each rank",
    "rank 0's values replace the others, so a codebook or a running normalizer loses the updates of the "
    "other ranks. Reduce it over ranks in forward, with trainer.gather or torch.distributed.all_reduce",
)
_OF_PASSES = (
    "in each pass of a step with train.exact",
    "their mean replaces them, which is right for a running mean, but not for a codebook: that needs "
    "train.exact=null",
)


class BufferCheck:
    """Warn once of each buffer whose values differ between ranks, or between the passes of an exact step.

    Args:
        model: unwrapped; buffers that are registered later are not compared.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, is_exact: bool) -> None:
        self._ranks, self._is_exact = ranks, is_exact
        places = places_of_buffers(model) if ranks.world_size > 1 or is_exact else {}
        self._places = {name: place for name, place in places.items() if not isinstance(place[0], _NORMS)}
        self._warned: set[str] = set()

    def hashes(self) -> Tensor:
        """Return the hash of each buffer, and its complement; this waits for the device."""
        found = bit_hashes((name, getattr(*place)) for name, place in self._places.items())
        hashes = torch.tensor([*found.values()], dtype=torch.int64)
        return torch.stack([hashes, ~hashes])

    def compare(self, passes: Sequence[Tensor]) -> None:
        """Warn of buffers that differ (a collective).

        Raises:
            UserError: on every rank, for a buffer of whole numbers in an exact step.


        Args:
            passes: `hashes` after each pass of this rank, or after the last one; none if it made no pass.
        """
        if not self._places:
            return
        least = torch.full((2, len(self._places)), torch.iinfo(torch.int64).min)
        most = torch.stack([least, *passes]).amax(0).to(self._ranks.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        differ = (most[0] != ~most[1]).tolist()  # the largest complement belongs to the smallest hash
        found = [name for name, differs in zip(self._places, differ, strict=True) if differs]
        for name in found if self._is_exact else ():
            if not (buffer := getattr(*self._places[name])).is_floating_point():
                raise UserError(
                    f"train.exact: passes leave different values in {name}, a buffer of {buffer.dtype}, and "
                    "whole numbers have no mean; set train.exact=null"
                )
        if (new := [name for name in found if name not in self._warned]) and self._ranks.is_main:
            where, what_follows = _OF_PASSES if self._is_exact else _OF_RANKS
            log.warning(
                "forward leaves different values %s in buffers of the model: %s. Before the next step, %s. "
                "The difference is harmless if forward in training doesn't use what an earlier step left "
                "there. See docs/howto/buffers.md",
                *(where, first_few(new), what_follows),
            )
        self._warned.update(new)
