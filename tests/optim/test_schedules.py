"""torch's optimizers and schedules: ReduceLROnPlateau is supported, and others fail before a step."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankFailure, run_ranks
from tests.runs import context_of, train
from trainer.errors import UserError
from trainer.optim.schedules import ScheduleFacts

PLATEAU = (
    "strategy=single",
    "schedule=plateau",
    "schedule.patience=0",
    "+schedule.threshold=0.9",  # a loss that does not fall to a tenth is on a plateau
    "schedule.factor=0.5",
    "model.hidden=[8]",
    "checkpoint.keep_last=9",
)


def _plateau(run_dir: Path) -> list[Any]:
    whole = train(*PLATEAU, "train.epochs=4", f"run_dir={run_dir / 'whole'}")
    stopped = run_dir / "whole" / "checkpoints" / "step_00000044"
    options = (*PLATEAU, "train.epochs=4", f"run_dir={run_dir / 'resumed'}", f"resume={stopped}")
    (run_dir / "resumed").mkdir()
    with context_of(*options) as context:
        restored = context.state.schedule.state_dict()
    resumed = train(*options[:-2], f"run_dir={run_dir / 'again'}", f"resume={stopped}")
    with pytest.raises(UserError, match=r"needs evaluations, but train\.eval_every_epochs=0"):
        train(*PLATEAU, "train.eval_every_epochs=0", f"run_dir={run_dir / 'never'}")
    return [whole["param_sha256"], resumed["param_sha256"], restored]


@pytest.mark.slow
def test_plateau_steps_with_evaluations_and_is_saved(tmp_path: Path) -> None:
    whole, resumed, restored = run_ranks(_plateau, 1, tmp_path, init=False)[0]
    assert restored["last_epoch"] == 2, "two evaluations in two epochs, not one step for each of 44 steps"
    assert restored["_last_lr"][0] < 0.1
    assert whole == resumed


def _by_accuracy(run_dir: Path) -> list[Any]:
    rises = ("schedule.metric=eval/accuracy", "+schedule.mode=max", "schedule.factor=0.5", "train.epochs=3")
    options = ("schedule=plateau", *rises, "schedule.patience=0", "model.hidden=[8]", "+schedule.threshold=9")
    train(*options, f"run_dir={run_dir / 'rises'}")
    messages = []
    for metric in ("eval/miou", "eval/loss"):
        with pytest.raises(UserError) as error:
            train(
                "schedule=plateau",
                f"schedule.metric={metric}",
                "+schedule.mode=max",
                f"run_dir={run_dir / 'no'}",
            )
        messages.append(str(error.value))
    lines = (run_dir / "rises" / "metrics.jsonl").read_text().splitlines()
    return [[json.loads(line)["train/lr"] for line in lines if "train/lr" in line][-1], *messages]


@pytest.mark.slow
def test_plateau_uses_the_configured_metric(tmp_path: Path) -> None:
    """No accuracy is nine times the previous one, so each evaluation except the first lowers the rate."""
    rate, unknown, falls = run_ranks(_by_accuracy, 1, tmp_path, init=False)[0]
    assert rate == pytest.approx(0.05)
    assert (
        "schedule.metric=eval/miou is not a metric of the evaluation; use one of eval/loss, eval" in unknown
    )
    assert "schedule.mode=max, but eval/loss should decrease" in falls


def test_a_schedule_accepts_epochs() -> None:
    node = {
        "step_size": "2 epochs",
        "milestones": ["1 epoch", 5, "1.5 epochs"],
        "gamma": 0.1,
        "name": "epochs",
    }
    found = ScheduleFacts(100, 22).in_steps(node)
    assert found == {"step_size": 44, "milestones": [22, 5, 33], "gamma": 0.1, "name": "epochs"}
    with pytest.raises(UserError, match="2 epochs cannot be converted to steps"):
        ScheduleFacts(100, None).in_steps(node)


def test_lbfgs_raises_before_the_first_step(tmp_path: Path) -> None:
    options = (
        "strategy=single",
        "optim._target_=torch.optim.LBFGS",
        "~optim.momentum",
        "~optim.weight_decay",
    )
    with pytest.raises(RankFailure, match="optim: LBFGS is not supported, because its step"):
        run_ranks(train, 1, *options, f"run_dir={tmp_path}", init=False)
