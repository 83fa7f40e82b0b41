"""Buffers of every dtype: those of rank 0 are what all ranks evaluate and save, under each strategy."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from tests.runs import context_of, train
from trainer.loop import fit
from trainer.strategies.buffers import ChangedBuffers, are_statistics

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
        self.offsets = nn.Parameter(torch.arange(3, dtype=torch.int16), requires_grad=False)
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
            assert seen[0] == zeros
        for strategy in found:
            assert found[strategy][1][1] == ones, f"{strategy}, before its second forward pass on rank {rank}"


def _without_steps_in_common(run_dir: str) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainer.strategies.parameter_server.asynchronous").addHandler(handler)
    train(*COMMON, "strategy=parameter_server", "strategy.max_staleness=1", f"run_dir={run_dir}")
    return said


def test_workers_that_have_buffers_of_their_own_say_so(tmp_path: Path) -> None:
    _, first, second = run_ranks(_without_steps_in_common, 3, str(tmp_path), init=False)
    assert [message[:35] for message in first] == ["the forward pass changes buffers, a"] and not second


class ByData(nn.Module):
    """Writes a buffer without a new version, from its third forward pass in training on."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            self.mean.data.add_(x.mean())
        return x


@pytest.mark.parametrize(("size", "small_bytes"), [(4, 0), (4, -1), (1, 4)])
def test_a_change_through_data_is_sent_from_the_next_pass_on(size: int, small_bytes: int) -> None:
    model, sent = ByData(size), []
    buffers = ChangedBuffers(model, lambda: sent.append(model.calls), lambda here: here, small_bytes)
    for _ in range(5):
        buffers.before_forward()
        model(torch.ones(2))
    assert sent == ([0, 1, 2, 3, 4] if model.mean.nbytes <= small_bytes else [3, 4])


def test_all_ranks_send_if_one_has_changed_its_buffers() -> None:
    model, sent = ByData(4), []
    buffers = ChangedBuffers(model, lambda: sent.append(1), lambda here: True, small_bytes=0)
    buffers.before_forward()
    assert sent == [1]


class Renorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.num_batches_tracked


class Named(nn.BatchNorm1d):
    """Without its own forward pass."""


def _mean_of(norm: nn.Module) -> Tensor:
    return norm.running_mean


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)


class ReadsDirectly(Reads):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.norm.running_mean


class ReadsInLambda(Reads):
    def forward(self, x: Tensor) -> Tensor:
        return (lambda: getattr(self.norm, "running_var") + self.norm(x))()  # noqa: B009


class ReadsByFunction(Reads):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + _mean_of(self.norm)


class OnlyUses(Reads):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_statistics_that_training_may_read_are_not_only_statistics() -> None:
    for kept in (nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.InstanceNorm1d(4), Named(4), OnlyUses()):
        assert are_statistics(kept), kept
    for read in (Renorm(4), ReadsDirectly(), ReadsInLambda(), ReadsByFunction()):
        assert not are_statistics(read), read
