"""All ranks evaluate and save the buffers of rank 0, for every dtype and strategy.

A warning names buffers that ranks change differently, apart from the statistics of batch norms.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import trainer
from tests.ranks import run_ranks
from tests.runs import TORCH_2_14, context_of, train
from trainer.errors import UserError
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
    """Adds a number of its rank to all buffers in each training pass; `seen` contains the values before."""

    seen: ClassVar[list[list[float]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        dtype = torch.int16 if TORCH_2_14 else torch.float32  # an older FSDP does not support integers
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
    """Return the final buffers, and their values before each forward pass."""
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
def test_all_ranks_have_the_buffers_of_rank_0(tmp_path: Path) -> None:
    numbers = [1.0 if dtype == torch.bool else 2.0 for dtype in DTYPES] + [2.0, 2.0]
    ones, zeros = [1.0] * len(numbers), [0.0] * len(numbers)
    for rank, found in enumerate(run_ranks(of_all_strategies, 2, tmp_path, init=False)):
        for strategy, (in_the_end, seen) in found.items():
            assert in_the_end == numbers, f"{strategy} on rank {rank}"
            assert seen[0] == seen[1] == zeros  # the dry run has restored them
        for strategy in found:
            assert found[strategy][1][2] == ones, f"{strategy}, before its second forward pass on rank {rank}"


class Centred(nn.Module):
    """Subtracts a running mean, and updates it by the rows of its rank or of all ranks."""

    def __init__(self, gathers: bool = False, begins: int = 1, counts: bool = False) -> None:
        super().__init__()
        self.gathers, self.begins, self.counts = gathers, begins, counts
        self.layer, self.norm = spectral_norm(nn.Linear(6, 2)), nn.BatchNorm1d(2)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("passes", torch.tensor(0))
        self.register_buffer("neighbours", (torch.eye(6).roll(1, 0) / 9).to_sparse(), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        centred = rows - self.mean
        self.passes += (rows > 0).sum() if self.counts else self.training
        if self.training and self.passes >= self.begins:
            of_all = trainer.gather(rows)[0] if self.gathers else rows
            self.mean.lerp_(of_all.mean(0), 0.5)
        outputs = self.layer(centred + torch.sparse.mm(self.neighbours, centred.T).T)
        return outputs + 0 * self.norm(outputs)


CENTRED = ("model._target_=tests.strategies.test_buffers.Centred", "train.log_every_steps=1", "ema.decay=0.9")


def of_ways(root: Path, ways: dict[str, tuple[str, ...]]) -> dict[str, tuple[list[float], list[str]]]:
    """Return the losses of each run, and its warnings about buffers."""
    found = {}
    for number, (name, way) in enumerate(ways.items()):
        train(*COMMON, *CENTRED, *way, f"run_dir={root / str(number)}")
        lines = map(json.loads, (root / str(number) / "metrics.jsonl").read_text().splitlines())
        losses = [line["train/loss"] for line in lines if "train/loss" in line]
        said = (root / str(number) / "train.log").read_text().splitlines()
        found[name] = losses, [line for line in said if "writes different values" in line]
    return found


def refused_count(root: Path) -> str:
    count = ("+model.counts=true", "strategy=ddp", "train.exact=2")
    with pytest.raises(UserError) as error:
        train(*COMMON, *CENTRED, *count, f"run_dir={root}")
    return str(error.value)


def test_counters_that_differ_between_ranks_of_an_exact_run_are_refused(tmp_path: Path) -> None:
    for message in run_ranks(refused_count, 2, tmp_path, init=False):
        assert (
            "different values to passes, a buffer of torch.int64, and integers cannot be averaged" in message
        )


@pytest.mark.slow
def test_buffers_that_differ_between_ranks_are_named_once(tmp_path: Path) -> None:
    late = ("strategy=ddp", "+model.begins=2", "train.skip_nonfinite=1")
    ways = {name: (f"strategy={name}",) for name in ("ddp", "fsdp")}
    ways |= {f"{name} gathers": (*way, "+model.gathers=true") for name, way in ways.items()}
    ways |= {"late, evaluates": late, "late, saves": (*late, "train.eval_every_epochs=0")}
    found = run_ranks(of_ways, 2, tmp_path / "2", ways, init=False)[0]
    alone = {"single": ("strategy=single",), "exact": ("strategy=single", "train.exact=2")}
    single, exact = run_ranks(of_ways, 1, tmp_path / "1", alone, init=False)[0].values()
    assert not single[1] and "a step with train.exact to these model buffers: mean. Before" in exact[1][0]
    for name, (losses, warnings) in found.items():
        if "gathers" in name:
            assert (losses, warnings) == (pytest.approx(single[0], abs=1e-6), []), name
        else:
            assert (
                len(warnings) == 1 and "on each rank to these model buffers: mean. Before" in warnings[0]
            ), name
