"""The moving average equals one computed by hand, on any device, in checkpoints, evaluations and exports."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests import runs
from tests.checkpoint import tiny
from tests.ranks import run_ranks
from trainer.checkpoint.__main__ import main
from trainer.evaluation import evaluate
from trainer.loop import evaluate_now, fit, save
from trainer.state.average import MovingAverage

COMMON = (
    "logger=jsonl",
    "model._target_=tests.user_parts.Normed",
    "~model.input_shape",
    "~model.num_classes",
    "~model.hidden",
    "model.freeze=['^layers.0.bias']",
    "data.dataset={_target_:tests.user_parts.Stripes}",
    "train.global_batch_size=16",  # 8 steps an epoch
    "train.max_steps=8",
    "schedule=constant",
    "checkpoint=sharded",
    "checkpoint.every_steps=5",
    "ema.decay=0.8",
)
STRATEGIES = {"single": 1, "ddp": 2, "fsdp": 2}
STAYS_WHOLE = ("strategy.reshard_after_forward=false", "strategy.unit_min_params=10")


def _whole(named: Any) -> dict[str, Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in named.items()
    }


def _averages(context: Any) -> dict[str, Tensor]:
    return _whole(context.state.state_dict()["ema"]["weights"])


def _by_hand(root: Path, options: tuple[str, ...]) -> dict[str, Any]:
    """Train for 8 steps, and compare the average after each with one computed here from full tensors."""
    apart = []
    with runs.context_of(*options, f"run_dir={root}") as context:
        expected = _averages(context)
        for _ in runs.steps_of(context):
            now = _whole(context.state.model.state_dict())
            expected = {name: 0.8 * value + 0.2 * now[name] for name, value in expected.items()}
            found = _averages(context)
            apart.append(max((found[name] - expected[name]).abs().max().item() for name in expected))
        before = _whole(context.state.model.state_dict())
        metrics = evaluate_now(context)[0]
        after = _whole(context.state.model.state_dict())
        with torch.no_grad():  # the same by other means: the averages written into the model
            for name, value in context.state.average.state_dict()["weights"].items():
                own = {
                    **dict(context.state.model.named_parameters()),
                    **dict(context.state.model.named_buffers()),
                }[name]
                own.copy_(value)
        context.strategy.weights_changed(context.model)
        written = evaluate(context.model_context, context.data.eval_loader).metrics
    return {
        "apart": apart,
        "names": sorted(expected),
        "disturbed": [n for n in before if "running" not in n and not before[n].equal(after[n])],
        "metrics": metrics,
        "written": written,
    }


def _stopped(root: Path, options: tuple[str, ...], foreign: str | None) -> dict[str, Any]:
    """Return an uninterrupted run, one resumed at step 5, and one resumed under another strategy."""
    found: dict[str, Any] = {}
    with runs.context_of(*options, f"run_dir={root / 'whole'}") as context:
        fit(context)
        found["whole"] = _averages(context)
    once = (*options, "checkpoint.every_steps=null", "checkpoint.every_epochs=null")
    stop = f"resume={root / 'whole' / 'checkpoints' / 'step_00000005'}"
    with runs.context_of(*once, stop, f"run_dir={root / 'resumed'}") as context:
        fit(context)
        found["resumed"] = _averages(context)
    if foreign is not None:
        with runs.context_of(*once, f"resume={foreign}", f"run_dir={root / 'foreign'}") as context:
            found["foreign"] = _averages(context)
    with runs.context_of(*once, "ema.decay=null", stop, f"run_dir={root / 'without'}") as context:
        save(context)
    lacking = f"resume={root / 'without' / 'checkpoints' / 'step_00000005'}"
    with runs.context_of(*once, lacking, "ema.evaluate=ema", f"run_dir={root / 'again'}") as context:
        weights = _whole(context.state.model.state_dict())
        found["again"] = all(value.equal(weights[name]) for name, value in _averages(context).items())
        fit(context)
        found["instead"] = sorted(evaluate_now(context)[0])
    return found


def _both(root: Path, options: tuple[str, ...], foreign: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    return _by_hand(root / "hand", options), _stopped(root / "stopped", options, foreign)


@pytest.mark.slow
def test_averages_under_each_strategy(tmp_path: Path) -> None:
    foreign, saved = None, {}
    for strategy, world in STRATEGIES.items():
        options = (*COMMON, f"strategy={strategy}", *(STAYS_WHOLE if strategy == "fsdp" else ()))
        ranks = run_ranks(_both, world, tmp_path / strategy, options, foreign, init=False)
        for by_hand, stopped in ranks:
            assert len(by_hand["apart"]) == 8 and max(by_hand["apart"]) < 1e-6
            assert "layers.0.bias" not in by_hand["names"] and "layers.1.running_mean" in by_hand["names"]
            assert by_hand["disturbed"] == []
            metrics = by_hand["metrics"]
            assert metrics["eval/ema/loss"] == by_hand["written"]["loss"] != metrics["eval/loss"]
            parameters = [name for name in stopped["whole"] if "running" not in name]
            assert all(stopped["whole"][name].equal(stopped["resumed"][name]) for name in parameters)
            assert stopped["again"] and "eval/ema/loss" not in stopped["instead"]
        of_rank_0 = ranks[0][1]
        assert all(value.equal(of_rank_0["resumed"][name]) for name, value in of_rank_0["whole"].items())
        if foreign is not None:
            assert all(value.equal(of_rank_0["foreign"][name]) for name, value in saved.items())
        foreign = str(tmp_path / strategy / "stopped" / "whole" / "checkpoints" / "step_00000005")
        out = tmp_path / f"{strategy}.safetensors"
        assert main(["convert", foreign, str(out), "--to", "safetensors", "--ema"]) == 0
        saved = {name: value for name, value in load_file(out).items() if name in of_rank_0["whole"]}
        assert len(saved) == 7
    without = tmp_path / "ddp" / "stopped" / "without" / "checkpoints" / "step_00000005"
    assert main(["convert", str(without), str(tmp_path / "no"), "--to", "torch", "--ema"]) == 2


def test_warmup_forgets_the_initial_weights_sooner() -> None:
    weight, averages = torch.zeros(1), []
    for warmup in (False, True):
        average = MovingAverage({"weight": weight.fill_(0)}, {}, 0.999, warmup)
        weight.fill_(1)
        for _ in range(10):
            average.update()
        averages.append(average.state_dict()["weights"]["weight"].item())
    slow, soon = averages
    assert slow == pytest.approx(1 - 0.999**10, rel=1e-4)
    assert soon == pytest.approx(1 - math.prod((1 + t) / (10 + t) for t in range(1, 11)), rel=1e-4)


def test_a_buffer_of_float8_has_no_average() -> None:
    """The dtype does not support addition."""
    state = tiny.train_state()
    state.model.register_buffer("scale", torch.ones(3).to(torch.float8_e4m3fn))
    state.keep_average(0.5, warmup=False)
    state.update_average()
    assert state.average is not None
    averaged = state.average.state_dict()["weights"]
    assert "norm.running_mean" in averaged and "scale" not in averaged


def test_weights_that_share_memory_are_restored() -> None:
    """A view of a buffer, and two parameters on one storage, as after `a.data = b.data`."""
    torch.manual_seed(0)
    table, first = torch.randn(2, 4), torch.randn(3, 3)
    holder, second = nn.Module(), torch.empty(0).set_(first.untyped_storage(), 0, first.shape)
    holder.register_buffer("table", table)
    holder.register_buffer("row", table[1])
    buffers = {name: (holder, name) for name, _ in holder.named_buffers()}
    average = MovingAverage({"first": first, "second": second}, buffers, 0.5, warmup=False)
    table.add_(1)
    first.mul_(3)
    average.update()
    before = [tensor.clone() for tensor in (table, first)]
    kept = {name: value.clone() for name, value in average.state_dict()["weights"].items()}
    with average.in_place():
        assert table.equal(kept["table"]) and first.equal(kept["first"])
    assert table.equal(before[0]) and first.equal(before[1])
    assert all(value.equal(kept[name]) for name, value in average.state_dict()["weights"].items())
