"""Buffers that a forward pass changes: each rank's next forward pass starts from rank 0's."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from trainer.strategies.shardable import BATCH_NORMS

_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def are_statistics(model: nn.Module) -> bool:
    """Whether all buffers are those of norms of torch, which training only writes.

    Those of rank 0 follow its own data in any case, and are used for evaluation and saving.
    """
    holders = [module for module in model.modules() if any(True for _ in module.buffers(recurse=False))]
    return all(isinstance(module, (*BATCH_NORMS, *_INSTANCE_NORMS)) for module in holders)


class ChangedBuffers:
    """Sends each rank rank 0's buffers before each forward pass, as DDP does, if the first pass changed any.

    Otherwise ranks would continue from their own, and a resumed run from those of rank 0. Constants, such as
    masks and tables of positions, are not sent.

    Args:
        sync: sends each rank the buffers of rank 0 (a collective).
        on_any: whether its argument is true on any rank (a collective).
    """

    def __init__(self, model: nn.Module, sync: Callable[[], None], on_any: Callable[[bool], bool]) -> None:
        self._model, self._sync, self._on_any = model, sync, on_any
        self._before_first: list[tuple[torch.Tensor, int]] | None = None
        self._change: bool | None = False if are_statistics(model) else None

    def before_forward(self) -> None:
        """Called before each forward pass in training, on all ranks (a collective, except the first)."""
        if self._change is None:
            now = [(buffer, buffer._version) for buffer in self._model.buffers()]
            if self._before_first is None:
                self._before_first = now
                return
            self._change = self._on_any(self._are_others(now))
        if self._change:
            self._sync()

    def _are_others(self, now: list[tuple[torch.Tensor, int]]) -> bool:
        before, self._before_first = self._before_first or [], None
        return len(now) != len(before) or any(
            buffer is not first or version != at_first
            for (buffer, version), (first, at_first) in zip(now, before, strict=True)
        )


def any_of(here: bool, device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Whether `here` is true on any rank of `group` (a collective)."""
    found = torch.tensor(float(here), device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return bool(found)
