"""Buffers of every dtype: those of rank 0 are what all ranks evaluate and save, under each strategy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from tests.runs import TORCH_2_14, context_of
from trainer.loop import fit

DTYPES = [
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.bool,
    torch.float32,
]
COMMON = (
    "logger=jsonl",
    "model._target_=tests.strategies.test_buffers.Marked",
    "~model.input_shape",
    "~model.num_classes",
    "~model.hidden",
    "data.dataset={_target_:tests.user_parts.Stripes}",
    "train.max_steps=2",
)


class Marked(nn.Module):
    """Each forward pass in training adds a number of its rank to all buffers; `seen` holds the values found."""

    seen: ClassVar[list[list[float]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        dtype = torch.int16 if TORCH_2_14 else torch.float32  # an older FSDP takes no integers
        self.offsets = nn.Parameter(torch.arange(3, dtype=dtype), requires_grad=False)
        for dtype in DTYPES:
            self.register_buffer(str(dtype).removeprefix("torch."), torch.zeros(5).to(dtype))
        self.register_buffer("transposed", torch.zeros(3, 2, dtype=torch.int16).t())
        self.register_buffer("scalar", torch.tensor(0, dtype=torch.uint16))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            Marked.seen.append([float(buffer.float().max()) for buffer in self.buffers()])
            for buffer in self.buffers():
                buffer.copy_(buffer.float() + 1 + int(os.environ["RANK"]))
        return self.layer(x) + self.offsets[1]


def marks(tmp_path: Path, *strategy: str) -> tuple[list[float], list[list[float]]]:
    """The final buffers, and their values in each forward pass."""
    Marked.seen = []
    with context_of(*COMMON, *strategy, f"run_dir={tmp_path}") as context:
        fit(context)
        return [float(buffer.float().max()) for buffer in context.state.model.buffers()], Marked.seen


def of_all_strategies(tmp_path: Path) -> dict[str, Any]:
    servers = ("strategy=parameter_server", "strategy.servers=all")
    return {
        strategy[0]: marks(tmp_path / str(number), *strategy)
        for number, strategy in enumerate([("strategy=fsdp",), ("strategy=ddp",), servers])
    }


@pytest.mark.slow
def test_all_ranks_have_those_of_rank_0(tmp_path: Path) -> None:
    numbers = [1.0 if dtype == torch.bool else 2.0 for dtype in DTYPES] + [2.0, 2.0]
    ones, zeros = [1.0] * len(numbers), [0.0] * len(numbers)
    for rank, found in enumerate(run_ranks(of_all_strategies, 2, tmp_path, init=False)):
        for strategy, (in_the_end, seen) in found.items():
            assert in_the_end == numbers, f"{strategy} on rank {rank}"
            assert seen[0] == seen[1] == zeros  # the rehearsal leaves none
        for strategy in found:
            assert found[strategy][1][2] == ones, f"{strategy}, before its second forward pass on rank {rank}"
