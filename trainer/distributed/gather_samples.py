"""Gather rows (one per sample) on rank 0 in the dataset's order, and outputs on all ranks for a loss."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from trainer.distributed.agreement import compare_across_ranks
from trainer.distributed.collectives import all_gather_single
from trainer.distributed.ranks import Ranks
from trainer.errors import UserError
from trainer.tensors.bits import bytes_of

Rows = dict[str, Tensor]
IN_EVALUATION = (
    "the samples in an evaluation batch depend on the number of ranks; return the embeddings from Task.rows, "
    "and compare them in Task.summarise_rows"
)
_SAME_LAYOUT = (
    "rows must have the same names, shapes and dtypes in every batch; pad them to one size "
    "(torch.nn.functional.pad), and convert them to one dtype"
)
_refusals: list[str | None] = []  # a stack of reasons why `gather` is not supported; empty outside a run


class SampleGather:
    """Gathers rows batch by batch, so that only rank 0 needs memory for more than one batch."""

    def __init__(self, ranks: Ranks, source: str) -> None:
        self._ranks, self._source = ranks, source
        self._layout: dict[str, str] = {}

    def __call__(self, rows: Mapping[str, Tensor], indices: Sequence[int]) -> tuple[list[int], Rows] | None:
        """Gather the batches of all ranks on the CPU of rank 0 (a collective).

        Args:
            rows: tensors (B, ...) by name. A rank without samples passes the rows of a filler sample.
            indices: the indices of the B samples; empty for a filler.

        Returns:
            On rank 0, the indices and rows of all ranks, sorted by index; None on other ranks.

        Raises:
            UserError: the number of rows is not the number of samples, or their shape or dtype differs from
                that of the previous batch or of another rank.
        """
        self._check(rows, len(indices))
        own = (
            list(indices),
            {
                name: bytes_of(column[: len(indices)].detach().cpu().resolve_conj().resolve_neg())
                for name, column in sorted(rows.items())
            },
        )  # bytes, since pickle lacks some dtypes, such as uint16 and float8
        gathered: list[Any] | None = [None] * self._ranks.world_size if self._ranks.is_main else None
        dist.gather_object(own, gathered, dst=0)
        if gathered is None:
            return None
        all_indices = [index for rank_indices, _ in gathered for index in rank_indices]
        order = torch.tensor(all_indices, dtype=torch.int64).argsort()
        all_rows = {}
        for name in own[1]:
            column = torch.cat([rank_rows[name] for _, rank_rows in gathered]).view(rows[name].dtype)
            all_rows[name] = column.view(len(all_indices), *rows[name].shape[1:])[order]
        return sorted(all_indices), all_rows

    def _check(self, rows: Mapping[str, Tensor], num_samples: int) -> None:
        if not isinstance(rows, Mapping):
            raise UserError(
                f"{self._source} returned a {type(rows).__name__}, but must return a dict of tensors by name"
            )
        for name, column in rows.items():
            is_tensor = isinstance(column, Tensor) and column.ndim > 0
            if not is_tensor or (num_samples and len(column) != num_samples):
                got = (
                    type(column).__name__
                    if not isinstance(column, Tensor)
                    else f"a tensor of shape {tuple(column.shape)}"
                )
                raise UserError(
                    f"{self._source} returned {name} as {got}, but must return a tensor with one row for "
                    f"each of the {num_samples} samples"
                )
        layout = {name: f"{tuple(rows[name].shape[1:])} {rows[name].dtype}" for name in sorted(rows)}
        if not self._layout:
            compare_across_ranks({f"the rows of {self._source}": str(layout)}, self._ranks, _SAME_LAYOUT)
            self._layout = layout
        if layout != self._layout:
            raise UserError(
                f"{self._source} returned {layout}, but {self._layout} in the previous batch; {_SAME_LAYOUT}"
            )


@contextmanager
def gathering(refusal: str | None) -> Iterator[None]:
    """Within the block, let `gather` gather from all ranks or, given a `refusal`, raise it as an error."""
    _refusals.append(refusal)
    try:
        yield
    finally:
        _refusals.pop()


def gather(z: Tensor) -> tuple[Tensor, int]:
    """Return the rows of `z` from all ranks, and the index of this rank's first row in them (a collective).

    Use it in a loss that compares samples of the whole global batch, as SimCLR and CLIP do: `Task.loss`
    compares the rows of its rank with all rows and returns the mean. Gradients flow back to the rank of each
    row. In a single process, and outside a run, it returns `(z, 0)`.

    Args:
        z: tensor (B, ...); B may differ between ranks.

    Raises:
        UserError: a step has several micro-batches, train.exact is set, or this is an evaluation.
    """
    if _refusals and _refusals[-1] is not None:
        raise UserError(f"trainer.gather: {_refusals[-1]}")
    if not _refusals or dist.get_world_size() == 1:
        return z, 0
    # On the CPU if possible, because the values are needed there.
    device = torch.device("cpu") if "gloo" in dist.get_backend_config() else z.device
    row = f"the shape {tuple(z.shape[1:])} and {z.dtype}"
    own = len(z), crc32(row.encode())
    facts = torch.empty(dist.get_world_size(), 2, dtype=torch.int64, device=device)
    all_gather_single(facts, torch.tensor([own], device=device))
    each, layouts = facts.T.tolist()
    if len({*layouts}) > 1:  # the backend would abort or mix up rows
        raise UserError(
            f"trainer.gather: rows have {row} on rank {dist.get_rank()}, but a different shape or dtype on "
            "another rank; pad rows to one shape"
        )
    first = sum(each[: dist.get_rank()])
    gathered: Tensor = _Gather.apply(z, each, first)
    return gathered, first


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, each: list[int], first: int) -> Tensor:
        ctx.rows = slice(first, first + len(z))
        most, world_size = max(each), len(each)
        padded = F.pad(z, (0, 0) * (z.ndim - 1) + (0, most - len(z))).contiguous()
        every = padded.new_empty(world_size * most, *z.shape[1:])
        all_gather_single(every, padded)
        if min(each) == most:
            return every
        parts = every.view(world_size, most, *z.shape[1:])
        return torch.cat([part[:length] for part, length in zip(parts, each, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Sum gradients over ranks, because the losses of all ranks depend on each row."""
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total[ctx.rows], None, None
