"""Compare buffers across ranks after forward passes, before a common value replaces them.

The common value is rank 0's or, with train.exact, the mean.
"""

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.distributed.ranks import Ranks
from trainer.errors import UserError, first_few
from trainer.model.plain_names import buffer_locations
from trainer.strategies.sharding import BATCH_NORMS
from trainer.tensors.bits import bit_hashes

log = logging.getLogger(__name__)
# In training, the forward passes of these modules don't read their running statistics.
_NORMS = (*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

_BETWEEN_RANKS = (
    "on each rank",
    "rank 0's values replace those of other ranks, so a codebook or a running normalizer loses the updates "
    "of other ranks. Reduce it over ranks in forward, with trainer.gather or torch.distributed.all_reduce",
)
_BETWEEN_PASSES = (
    "in each pass of a step with train.exact",
    "their mean replaces them, which is right for a running mean, but not for a codebook, which needs "
    "train.exact=null",
)


class BufferCheck:
    """Warns once about each buffer that differs between ranks, or between the passes of an exact step.

    Args:
        model: the unwrapped model. Buffers that are registered later are not compared.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, is_exact: bool) -> None:
        self._ranks, self._is_exact = ranks, is_exact
        locations = buffer_locations(model) if ranks.world_size > 1 or is_exact else {}
        self._locations = {name: at for name, at in locations.items() if not isinstance(at[0], _NORMS)}
        self._warned: set[str] = set()

    def hashes(self) -> Tensor:
        """Wait for the device; return each buffer's hash and the hash's complement, int64 (2, buffers)."""
        by_name = bit_hashes((name, getattr(*at)) for name, at in self._locations.items())
        hashes = torch.tensor([*by_name.values()], dtype=torch.int64)
        return torch.stack([hashes, ~hashes])

    def compare(self, passes: Sequence[Tensor]) -> None:
        """Warn about buffers that differ (a collective).

        Args:
            passes: the `hashes` after each pass of this rank, or only after its last pass; [] if it ran none.

        Raises:
            UserError: on every rank, if a buffer of integers differs in an exact step.
        """
        if not self._locations:
            return
        least = torch.full((2, len(self._locations)), torch.iinfo(torch.int64).min)
        most = torch.stack([least, *passes]).amax(0).to(self._ranks.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        differs = (most[0] != ~most[1]).tolist()  # the largest complement belongs to the smallest hash
        different = [name for name, is_other in zip(self._locations, differs, strict=True) if is_other]
        for name in different if self._is_exact else ():
            if not (buffer := getattr(*self._locations[name])).is_floating_point():
                raise UserError(
                    f"train.exact: the passes of a step write different values to {name}, a buffer of "
                    f"{buffer.dtype}, and integers cannot be averaged; set train.exact=null"
                )
        if (new := [name for name in different if name not in self._warned]) and self._ranks.is_main:
            where, consequence = _BETWEEN_PASSES if self._is_exact else _BETWEEN_RANKS
            log.warning(
                "forward() writes different values %s to these model buffers: %s. Before the next step, %s. "
                "This is harmless if forward() in training mode doesn't read values from earlier steps. "
                "See docs/howto/buffers.md",
                *(where, first_few(new), consequence),
            )
        self._warned.update(new)
