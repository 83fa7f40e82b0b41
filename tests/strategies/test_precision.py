"""bf16 and fp16 train like fp32, and an fp16 overflow on any rank skips the step on all."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.failures.test_ends import refusals
from tests.ranks import run_ranks
from tests.runs import context_of, train
from tests.strategies.test_ddp import QUICK as SMALL
from trainer.context import Run
from trainer.step import train_step

QUICK = (
    "logger=jsonl",
    "train.max_steps=66",
    "train.eval_every_epochs=0",
    "checkpoint.every_epochs=null",
    "model.hidden=[32]",
)
WORLD_SIZE = {"single": 1, "ddp": 2, "fsdp": 2}


def losses(strategy: str, run_dir: Path) -> list[float]:
    return [
        train(
            f"strategy={strategy}", f"train.precision={precision}", f"run_dir={run_dir}/{precision}", *QUICK
        )["train/loss"]
        for precision in ("fp32", "bf16", "fp16")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", WORLD_SIZE)
def test_half_precision_trains_like_fp32(strategy: str, tmp_path: Path) -> None:
    fp32, bf16, fp16 = run_ranks(losses, WORLD_SIZE[strategy], strategy, tmp_path, init=False)[0]
    assert fp32 < 1.5, "from ln 10 = 2.3, so that the comparisons below compare something learned"
    assert bf16 == pytest.approx(fp32, rel=0.01)
    assert fp16 == pytest.approx(fp32, rel=0.01)
    assert bf16 != fp32 != fp16, "equal bits would mean that the precision was ignored"


def overflow_here(context: Run) -> None:
    """Make the gradient of this rank's batch, or of its shard under FSDP, overflow."""
    first = next(context.model.parameters())
    if not isinstance(first, DTensor):
        first.register_hook(lambda grad: grad * torch.inf)
        return
    scaler = context.state.scaler
    unscale = scaler.unscale_

    def unscale_(optimizer: torch.optim.Optimizer) -> None:
        first.grad.to_local().fill_(torch.inf)  # type: ignore[union-attr]
        unscale(optimizer)

    scaler.unscale_ = unscale_  # type: ignore[method-assign]


def overflow(strategy: str, run_dir: Path) -> dict[str, Any]:
    options = (f"strategy={strategy}", "train.precision=fp16", f"run_dir={run_dir}", *QUICK)
    with warnings.catch_warnings(record=True) as caught, context_of(*options) as context:
        batches = context.data.train_loader.epoch(0)
        before = [parameter.detach().clone() for parameter in context.model.parameters()]
        scaler = context.state.scaler
        scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**17})
        if context.ranks.rank == context.ranks.world_size - 1:
            overflow_here(context)
        train_step(context, batches)
        same = all(torch.equal(a, b) for a, b in zip(before, context.model.parameters(), strict=True))
    return {"same": same, "scale": scaler.get_scale(), "warnings": [str(w.message) for w in caught]}


@pytest.mark.parametrize(
    "strategy", [pytest.param(each, marks=[pytest.mark.slow] * (each != "ddp")) for each in WORLD_SIZE]
)
def test_overflow_skips_the_step_everywhere(strategy: str, tmp_path: Path) -> None:
    for rank in run_ranks(overflow, WORLD_SIZE[strategy], strategy, tmp_path, init=False):
        assert rank["same"]
        assert rank["scale"] == 2.0**16
        assert rank["warnings"] == []


class Rooted(nn.Module):
    """A model whose gradient is infinite from pass `since` on, while its loss is finite."""

    def __init__(self, since: int) -> None:
        super().__init__()
        self.layer, self.since, self.passes = nn.Linear(6, 2), since, 0

    def forward(self, rows: Tensor) -> Tensor:
        self.passes += 1
        return self.layer(rows) + (self.layer.weight.sum() * (self.passes < self.since)).abs().sqrt()


@pytest.mark.slow
def test_a_run_ends_if_every_step_overflows(tmp_path: Path) -> None:
    own = (*SMALL, "model._target_=tests.strategies.test_precision.Rooted", "+model.since=4")
    steps = ("train.max_steps=60", "train.epochs=100", "train.log_every_steps=10", "train.precision=fp16")
    ((message,),) = run_ranks(refusals, 1, (*own, *steps, f"run_dir={tmp_path}"), init=False)
    assert "50 steps in a row, up to step 52, were skipped because of NaN or Inf gradients" in message
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    skipped = {line["step"]: line["train/skipped_steps"] for line in logged if "train/skipped_steps" in line}
    assert skipped == {10: 8, 20: 18, 30: 28, 40: 38, 50: 48}
