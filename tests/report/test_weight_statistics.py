"""Statistics of a step are equal for one rank and for shards; FLOPs are counted; a profile is written."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.ranks import run_ranks
from tests.runs import context_of, train
from trainer.distributed.ranks import Ranks
from trainer.report.meter import Meter
from trainer.report.mfu import ModelFlops
from trainer.report.weight_statistics import histograms
from trainer.run_dir.metrics_file import read_metrics
from trainer.state.progress import Update
from trainer.tasks import Classification, LanguageModelling

CPU = torch.device("cpu")
SHORT = ("train.max_steps=6", "train.log_every_steps=3", "model.hidden=[300]", "checkpoint.every_epochs=null")
SHORT += ("train.global_batch_size=64", "optim.momentum=0", "logger=jsonl")


def seen(run_dir: Path, *overrides: str) -> dict[str, Any]:
    """Return the histograms of step 6, update_to_weight and the norm of the gradient."""
    from trainer.loop import fit

    run_dir /= f"{dist.get_rank() if dist.is_initialized() else 0}"
    with context_of(*SHORT, "train.histograms_every=3", f"run_dir={run_dir}", *overrides) as context:
        fit(context)
        return {"histograms": context.report.weight_statistics.histograms, "scalars": read_metrics(run_dir)}


@pytest.mark.slow
def test_statistics_are_equal_for_one_rank_and_for_shards(tmp_path: Path) -> None:
    (whole,) = run_ranks(seen, 1, tmp_path / "one", "strategy=single", init=False)
    for strategy in ("ddp", "fsdp"):
        parts = run_ranks(seen, 2, tmp_path / strategy, f"strategy={strategy}", init=False)[0]
        assert parts["histograms"].keys() == whole["histograms"].keys()
        for name, (counts, edges) in whole["histograms"].items():
            its_counts, its_edges = parts["histograms"][name]
            assert its_counts.sum() == counts.sum(), "every value once"
            assert (its_counts - counts).abs().sum() <= 0.02 * counts.sum() + 2, (
                f"{name}: one at an edge may move"
            )
            torch.testing.assert_close(its_edges, edges, rtol=1e-3, atol=1e-6)
        sampled = {"train/update_to_weight": 0.1}  # the samples of shards differ from those of a whole layer
        for name, rel in {**sampled, "train/grad_norm": 1e-4, "train/plain_loss": 1e-4}.items():
            for step, value in whole["scalars"][name].items():
                assert parts["scalars"][name][step] == pytest.approx(value, rel=rel), (strategy, name)
    counts, edges = whole["histograms"]["weights/1.weight"]
    assert counts.sum() == 64 * 300
    assert edges[0] < 0 < edges[-1]
    assert whole["histograms"]["gradients/1.weight"][1][-1] != edges[-1]


def ratio_of_sgd(run_dir: Path) -> tuple[float, float]:
    """Return update_to_weight of the first step of plain SGD: as logged, and computed from the gradient."""
    from trainer.loop import fit

    options = (
        "train.log_every_steps=1",
        "train.max_steps=1",
        "optim.weight_decay=0",
        "train.eval_every_epochs=0",
    )
    with context_of(*SHORT, *options, f"run_dir={run_dir}") as context:
        before = math.sqrt(
            sum(p.detach().double().square().sum().item() for p in context.state.model.parameters())
        )
        lr = context.state.optimizer.param_groups[0]["lr"]
        fit(context)
    scalars = read_metrics(run_dir)
    return scalars["train/update_to_weight"][1], lr * scalars["train/grad_norm"][1] / before


def test_update_to_weight_uses_the_norm_of_the_update(tmp_path: Path) -> None:
    """The first layer has 19,200 weights, more than the sample size."""
    ((logged, expected),) = run_ranks(ratio_of_sgd, 1, tmp_path, init=False)
    assert logged == pytest.approx(expected, rel=0.1)
    assert logged > 0


def of_odd_values() -> dict[str, tuple[Tensor, Tensor]]:
    mine = torch.full((3,), float(dist.get_rank()))
    odd = torch.tensor([1.0, math.nan, math.inf, 1.0])
    return histograms([("spread", mine), ("odd", odd), ("none", None)], torch.device("cpu"))


def test_histograms_of_non_finite_or_missing_values() -> None:
    found = run_ranks(of_odd_values, 2)[1]
    assert found["spread"][0].tolist() == [1.5, *[0.0] * 62, 1.5], (
        "both ranks hold the tensor: each counts half"
    )
    assert found["odd"][0].sum() == 2, "of four"
    assert found["none"][0].sum() == 0


def of_two_micro_batches() -> dict[str, float]:
    """Return metrics for text whose tokens on rank 1 are mostly padding."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    meter = Meter(Ranks(rank, rank, world, world, (0,) * world, torch.device("cpu"), "gloo"))
    smoothed = Classification(label_smoothing=0.5)
    meter.start()
    begin = meter.mark()
    images, tokens = (torch.rand(4, 10), torch.arange(4)), torch.zeros(3, 7, dtype=torch.long)
    targets = tokens if rank == 0 else tokens.where(torch.arange(7) < 2, -100)
    loss = smoothed.loss(nn.Identity(), images)
    for _ in range(2):
        meter.count_batch(smoothed, images, None, 2, 1)
        meter.count_batch(LanguageModelling(), (tokens, targets), None, 2, 1)
    meter.count_step(1, [loss.detach()], loss.detach(), Update.MADE)
    plain = nn.functional.cross_entropy(*images).item()
    return meter.metrics(begin, global_batch_size=12) | {"expected": plain, "minimised": loss.item()}


def test_token_counts_and_loss_parts_of_a_task() -> None:
    ranks = run_ranks(of_two_micro_batches, 2)
    for metrics in ranks:
        of_both = {name: (ranks[0][name] + ranks[1][name]) / 2 for name in ("expected", "minimised")}
        assert metrics["train/plain_loss"] == pytest.approx(of_both["expected"])
        assert metrics["train/loss"] == pytest.approx(of_both["minimised"]) != of_both["expected"]
        per_sample = metrics["usage/tokens_per_second"] / metrics["usage/samples_per_second"]
        assert per_sample == pytest.approx((7 + 2) / 2)


@pytest.mark.slow
def test_flops_of_a_gpt() -> None:
    from models.gpt import GPT

    model = GPT(vocab_size=64, block_size=32)
    tokens = torch.zeros(4, 32, dtype=torch.long)
    flops = ModelFlops(model, LanguageModelling(), 1, 1.0, CPU)
    drawn = torch.random.get_rng_state()
    flops.see((tokens, tokens))
    assert torch.equal(drawn, torch.random.get_rng_state())
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert flops.utilisation(1.0) == pytest.approx(6 * matrices * tokens.numel(), rel=0.2)
    with FlopCounterMode(display=False) as computed:
        LanguageModelling().loss(model.train(), (tokens, tokens)).backward()
    assert flops.utilisation(1.0) == computed.get_total_flops(), "fused attention, too"


class Asks(nn.Linear):
    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) if rows.sum().item() >= 0 else rows


def test_uncountable_flops_do_not_disturb_training() -> None:
    flops = ModelFlops(Asks(8, 2), Classification(), 1, 1.0, CPU)
    flops.see((torch.zeros(1, 8), torch.zeros(1, dtype=torch.long)))
    assert flops.utilisation(1.0) is None


@pytest.mark.slow
def test_profile_of_each_rank(tmp_path: Path) -> None:
    profile = ("train.profile={start: 3, steps: 2}", "train.peak_tflops=0.01")
    run_ranks(train, 2, *SHORT, *profile, f"run_dir={tmp_path}", init=False)
    for rank in (0, 1):
        with gzip.open(tmp_path / "profile" / f"rank_{rank}.json.gz") as file:
            events = json.load(file)["traceEvents"]
        steps = {event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep")}
        assert steps == {"ProfilerStep#3", "ProfilerStep#4"}
        assert any("all-reduce bucket" in str(event.get("name")) for event in events)
    assert len(list((tmp_path / "profile").iterdir())) == 2
    assert all(0 < value < 1 for value in read_metrics(tmp_path)["usage/mfu"].values())
