"""What ranks have of samples: rows, gathered on rank 0 in the dataset's order; and outputs, for a loss."""

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
    "which samples an evaluation has in a batch depends on the number of ranks; return the embeddings from "
    "the task's rows, and compare them in summarise_rows"
)
_ALIKE = (
    "rows must have the same names, shape and dtype in every batch: pad them to one size "
    "(torch.nn.functional.pad), and convert them to one dtype"
)
_refusals: list[str | None] = []  # of the run of this process, and what it does; empty outside a run


class SampleGather:
    """Gathers one batch at a time, so that ranks other than 0 hold no more than that.

    Args:
        source: what produced the rows, for messages.
    """

    def __init__(self, ranks: Ranks, source: str) -> None:
        self._ranks, self._source = ranks, source
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
        own = (
            list(indices),
            {
                name: bytes_of(column[: len(indices)].detach().cpu().resolve_conj().resolve_neg())
                for name, column in sorted(rows.items())
            },
        )  # bytes, since pickle lacks some dtypes, such as uint16 and float8
        of_all: list[Any] | None = [None] * self._ranks.world_size if self._ranks.is_main else None
        dist.gather_object(own, of_all, dst=0)
        if of_all is None:
            return None
        together = [index for theirs, _ in of_all for index in theirs]
        order = torch.tensor(together, dtype=torch.int64).argsort()
        whole = {}
        for name in own[1]:
            column = torch.cat([theirs[name] for _, theirs in of_all]).view(rows[name].dtype)
            whole[name] = column.view(len(together), *rows[name].shape[1:])[order]
        return sorted(together), whole

    def _check(self, rows: Mapping[str, Tensor], num_samples: int) -> None:
        if not isinstance(rows, Mapping):
            raise UserError(f"{self._source} gives a {type(rows).__name__}, but must give tensors by name")
        for name, column in rows.items():
            is_tensor = isinstance(column, Tensor) and column.ndim > 0
            if not is_tensor or (num_samples and len(column) != num_samples):
                found = type(column).__name__ if not isinstance(column, Tensor) else tuple(column.shape)
                raise UserError(
                    f"{self._source} gives {name} as {found}, but must give a tensor with a row for each of "
                    f"{num_samples} samples"
                )
        layout = {name: f"{tuple(rows[name].shape[1:])} {rows[name].dtype}" for name in sorted(rows)}
        if not self._layout:
            compare_across_ranks({f"the rows that {self._source} gives": str(layout)}, self._ranks, _ALIKE)
            self._layout = layout
        if layout != self._layout:
            raise UserError(
                f"{self._source} gives {layout}, but gave {self._layout} for the batch before; {_ALIKE}"
            )


@contextmanager
def gathering(refusal: str | None) -> Iterator[None]:
    """Within, `gather` works over all ranks, or raises an error that says `refusal`."""
    _refusals.append(refusal)
    try:
        yield
    finally:
        _refusals.pop()


def gather(z: Tensor) -> tuple[Tensor, int]:
    """Return the rows of `z` of all ranks, and the number of this rank's first row among them (a collective).

    For a loss that compares samples of the whole global batch, as SimCLR's and CLIP's do: `Task.loss`
    compares the rows of its rank with all, and returns their mean. Gradients go back to each rank's rows.
    In a single process, and outside a run, it returns `(z, 0)`.

    Args:
        z: (B, ...); ranks may have unequal B.

    Raises:
        UserError: a step has several micro-batches, train.exact is set, or this is an evaluation.
    """
    if _refusals and _refusals[-1] is not None:
        raise UserError(f"trainer.gather: {_refusals[-1]}")
    if not _refusals or dist.get_world_size() == 1:
        return z, 0
    # On the host, since the host would wait for a GPU.
    device = torch.device("cpu") if "gloo" in dist.get_backend_config() else z.device
    row = f"the shape {tuple(z.shape[1:])} and {z.dtype}"
    own = len(z), crc32(row.encode())
    facts = torch.empty(dist.get_world_size(), 2, dtype=torch.int64, device=device)
    all_gather_single(facts, torch.tensor([own], device=device))
    each, layouts = facts.T.tolist()
    if len({*layouts}) > 1:  # a backend would abort, or mix rows up
        raise UserError(
            f"trainer.gather: a row has {row} on rank {dist.get_rank()}, and not on all others; pad rows to "
            "one shape"
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
        """The losses of all ranks depend on the rows of each; the strategy divides their sum."""
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total[ctx.rows], None, None
