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

    A row is sent as bytes: its sample's index, then its columns; one collective for each batch.

    Args:
        batch_size: the largest number of samples in a rank's batch (EvalLoader.batch_size).
        source: what produced the rows, for messages.
    """

    def __init__(self, dist_: "Dist", batch_size: int, source: str) -> None:
        self._dist, self._batch_size, self._source = dist_, batch_size, source
        # gloo sends from host memory, NCCL from the GPU.
        self._device = torch.device("cpu") if "gloo" in dist_.backend else dist_.device
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
        own = torch.full((self._batch_size, 1), -1, dtype=torch.int64, device=self._device)
        own[: len(indices), 0] = torch.tensor(list(indices), dtype=torch.int64)
        packed = torch.cat([_as_bytes(own), *(self._padded(rows[name]) for name in sorted(rows))], dim=1)
        of_all = packed.new_empty(self._dist.world_size, *packed.shape) if self._dist.is_main else None
        dist.gather(packed, None if of_all is None else list(of_all), dst=0)
        return None if of_all is None else self._unpacked(of_all.flatten(0, 1).cpu(), rows)

    def _check(self, rows: Mapping[str, Tensor], num_samples: int) -> None:
        if not isinstance(rows, Mapping):
            raise UserError(f"{self._source} gives a {type(rows).__name__}, but must give tensors by name")
        for name, column in rows.items():
            if not isinstance(column, Tensor):
                raise UserError(
                    f"{self._source} gives {name} as a {type(column).__name__}, but must give a tensor "
                    "with a row for each sample"
                )
            if column.ndim == 0 or len(column) != (num_samples or len(column)):
                raise UserError(
                    f"{self._source} gives {name} of shape {tuple(column.shape)} for a batch of "
                    f"{num_samples} samples; its first dimension must be {num_samples}"
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

    def _padded(self, column: Tensor) -> Tensor:
        """The bytes of a column, padded to (batch_size, bytes of a row); for a filler, only padding."""
        flat = _as_bytes(column.detach().to(self._device).reshape(len(column), -1))[: self._batch_size]
        padded = flat.new_zeros(self._batch_size, flat.shape[1])
        padded[: len(flat)] = flat
        return padded

    def _unpacked(self, packed: Tensor, like: Mapping[str, Any]) -> tuple[list[int], Rows]:
        indices = packed[:, :8].contiguous().view(torch.int64).squeeze(1)
        order = indices.argsort()[int((indices < 0).sum()) :]
        rows, begin = {}, 8
        for name in sorted(like):
            shape, dtype = like[name].shape[1:], like[name].dtype
            end = begin + shape.numel() * dtype.itemsize
            rows[name] = packed[order, begin:end].flatten().view(dtype).reshape(len(order), *shape)
            begin = end
        return indices[order].tolist(), rows


def _as_bytes(matrix: Tensor) -> Tensor:
    return matrix.contiguous().view(torch.uint8)
