"""Gathers rows of samples from all ranks on rank 0: each sample once, in the order of the dataset."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed.agreement import compare_across_ranks
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.distributed.process_group import Dist

Rows = dict[str, Tensor]


class SampleGather:
    """Gathers one batch at a time, so that ranks other than 0 hold no more than that.

    Args:
        source: what produced the rows, for messages.
    """

    def __init__(self, dist_: "Dist", source: str) -> None:
        self._dist, self._source = dist_, source
        self._layout: dict[str, str] = {}

    def __call__(self, rows: Mapping[str, Tensor], indices: Sequence[int]) -> tuple[list[int], Rows] | None:
        """Return this batch of all ranks, indices and rows, on rank 0's CPU; None elsewhere (a collective).

        Args:
            rows: (B, ...) each. A rank without samples passes those of a filler.
            indices: of the samples; empty for a filler.

        Raises:
            UserError: the rows are not one for each sample, or differ in shape or dtype from the batch before
                or from another rank.
        """
        self._check(rows, len(indices))
        own = list(indices), {name: rows[name][: len(indices)].detach().cpu() for name in sorted(rows)}
        of_all: list[Any] | None = [None] * self._dist.world_size if self._dist.is_main else None
        dist.gather_object(own, of_all, dst=0)
        if of_all is None:
            return None
        together = [index for theirs, _ in of_all for index in theirs]
        order = torch.tensor(together, dtype=torch.int64).argsort()
        whole = {name: torch.cat([theirs[name] for _, theirs in of_all])[order] for name in own[1]}
        return sorted(together), whole

    def _check(self, rows: Mapping[str, Tensor], num_samples: int) -> None:
        if not isinstance(rows, Mapping):
            raise UserError(f"{self._source} gives a {type(rows).__name__}, but must give tensors by name")
        for name, column in rows.items():
            is_tensor = isinstance(column, Tensor) and column.ndim > 0
            if not is_tensor or (num_samples and len(column) != num_samples):
                found = f"with {len(column)} rows" if is_tensor else f"as a {type(column).__name__}"
                raise UserError(
                    f"{self._source} gives {name} {found}, but must give a tensor with a row for each of "
                    f"{num_samples} samples"
                )
        layout = {name: f"{tuple(rows[name].shape[1:])} {rows[name].dtype}" for name in sorted(rows)}
        if not self._layout:
            compare_across_ranks({f"the rows that {self._source} gives": str(layout)}, self._dist)
            self._layout = layout
        if layout != self._layout:
            raise UserError(
                f"{self._source} gives {layout}, but gave {self._layout} for the batch before; rows must "
                "have the same shape and dtype: pad them"
            )
