"""train.early_stopping and train.max_hours end a run on all ranks at the same step, also after a resume."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankFailure, run_ranks
from tests.runs import train
from trainer.config import EarlyStoppingConfig
from trainer.run_dir.metrics_file import read_metrics
from trainer.state.early_end import EarlyEnd

QUICK = ("logger=jsonl", "model.hidden=[8]", "train.global_batch_size=256", "checkpoint.keep_last=9")
# No evaluation is that much better than the first: the run ends with the third, in mid-epoch.
STOP = "train.early_stopping={metric: eval/loss, patience: 2, min_delta: 100}"
STOPS = (*QUICK, STOP, "train.eval_every_steps=3", "train.eval_every_epochs=0", "checkpoint.every_steps=3")


def stopped(root: Path, *strategies: str) -> list[list[dict[str, Any]]]:
    """Return, for each strategy, a run, the same run again, and one resumed after its second evaluation."""
    found = []
    for strategy in strategies:
        place, words = root / strategy, (f"strategy={strategy}", *STOPS)
        runs = [train(*words, f"run_dir={place}"), train(*words, f"run_dir={place}", "resume=auto")]
        second = place / "checkpoints" / "step_00000006"
        found.append([*runs, train(*words, f"run_dir={place}-on", f"resume={second}")])
    return found


@pytest.mark.parametrize(
    ("world_size", "strategies"),
    [(1, ["single"]), pytest.param(2, ["ddp", "fsdp", "parameter_server"], marks=pytest.mark.slow)],
)
def test_all_ranks_stop_when_no_evaluation_improves(
    world_size: int, strategies: list[str], tmp_path: Path
) -> None:
    everyones = run_ranks(stopped, world_size, tmp_path, *strategies, init=False)
    for number, strategy in enumerate(strategies):
        for first, again, resumed in (found[number] for found in everyones):
            assert (first["steps"], first["ended_by"], first["epochs"] % 1 > 0) == (
                9,
                "train.early_stopping",
                True,
            )
            assert (again["steps"], again["param_sha256"]) == (9, first["param_sha256"])
            assert (resumed["steps"], resumed["param_sha256"]) == (9, first["param_sha256"])
        written = json.loads((tmp_path / strategy / "result.json").read_text())
        evaluated = read_metrics(tmp_path / strategy)["eval/loss"]
        assert list(evaluated) == [3, 6, 9] and written["eval/loss"] == evaluated[9], "the last one once"
        assert (tmp_path / strategy / "checkpoints" / "step_00000009").is_dir()
        said = (tmp_path / strategy / "train.log").read_text()
        assert said.count("eval at step 9") == 1
        assert "stopped after step 9 of 150: train.early_stopping: eval/loss has not improved by" in said


def out_of_time(root: Path, *strategies: str) -> list[list[dict[str, Any]]]:
    """Return, for each strategy, a run, the same run again, and one with more time."""
    found = []
    for strategy in strategies:
        words = (f"strategy={strategy}", *QUICK, f"run_dir={root / strategy}", "train.max_steps=5")
        hours = ("train.max_hours=1e-9", "train.max_hours=1e-9", "train.max_hours=9")
        found.append([train(*words, each, "resume=auto") for each in hours])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "strategies"),
    [(1, ["single"]), (2, ["ddp", "fsdp", "parameter_server"])],
)
def test_a_run_that_reaches_max_hours_is_saved_and_evaluated(
    world_size: int, strategies: list[str], tmp_path: Path
) -> None:
    everyones = run_ranks(out_of_time, world_size, tmp_path, *strategies, init=False)
    for number, strategy in enumerate(strategies):
        for first, again, on in (found[number] for found in everyones):
            assert (first["steps"], first["ended_by"]) == (1, "train.max_hours") and first["eval/loss"] > 0
            assert (again["steps"], again["ms_per_step"]) == (1, None) or math.isnan(again["ms_per_step"])
            assert on["steps"] == 5 and "ended_by" not in on
        said = (tmp_path / strategy / "train.log").read_text()
        assert "stopped after step 1 of 5: train.max_hours=1e-09 is reached; set a larger value" in said


# ---- counting


def counted(stop: EarlyStoppingConfig, *values: float) -> list[bool]:
    end, found = EarlyEnd(stop), []
    for step, value in enumerate(values):
        end.after_evaluation(step, {"m": value})
        end = resumed(end, stop)
        found.append(end.setting is not None)
    return found


def resumed(
    end: EarlyEnd, stop: EarlyStoppingConfig | None = None, max_hours: float | None = None
) -> EarlyEnd:
    new = EarlyEnd(stop, max_hours)
    new.load_state_dict(json.loads(json.dumps(end.state_dict())))
    new.continue_after(end.hours())
    return new


def test_only_an_improvement_above_min_delta_resets_the_count() -> None:
    least = EarlyStoppingConfig("m", patience=2)
    assert counted(least, 3, 2, 2, 1, 2, 1) == [False] * 5 + [True]
    assert counted(least, math.nan, 2, math.nan, math.nan) == [False, False, False, True]
    assert counted(EarlyStoppingConfig("m", patience=1, mode="max"), 0.1, 0.2, 0.2) == [False, False, True]
    assert counted(EarlyStoppingConfig("m", patience=1, min_delta=0.5), 2, 1.6) == [False, True]
    assert counted(EarlyStoppingConfig("m", patience=1, min_delta=0.5), 2, 1.4) == [False, False]


def test_a_resume_with_another_metric_resets_the_count() -> None:
    end = EarlyEnd(EarlyStoppingConfig("eval/loss", patience=2))
    for step in (1, 2):
        end.after_evaluation(step, {"eval/loss": 2.3})
    for other in (EarlyStoppingConfig("eval/accuracy", 2, "max"), EarlyStoppingConfig("eval/loss", 2, "max")):
        on = resumed(end, other)
        on.after_evaluation(3, {other.metric: 0.5})
        assert on.setting is None
        on.after_evaluation(4, {other.metric: 0.4})
        assert on.setting is None, "0.5 is the best of this metric; 2.3 was no value of it"


def test_max_hours_counts_all_resumes() -> None:
    end = EarlyEnd(max_hours=2.0)
    end._started_s -= 1.5 * 3600
    assert not end.time_is_up()
    end = resumed(resumed(end), max_hours=2.0)  # also those of a launch without a limit
    assert not end.time_is_up()
    end._started_s -= 0.6 * 3600
    assert end.time_is_up() and resumed(end, max_hours=2.0).setting == "train.max_hours"
    assert resumed(end, max_hours=3.0).setting is None
    assert resumed(end).setting is None and resumed(EarlyEnd(), max_hours=1.0).setting is None


def test_an_unknown_metric_is_refused(tmp_path: Path) -> None:
    words = ("strategy=single", "train.early_stopping={metric: loss, patience: 1}", f"run_dir={tmp_path}")
    with pytest.raises(
        RankFailure,
        match=r"train\.early_stopping\.metric=loss is not a metric of the evaluation; use one of eval/loss",
    ):
        run_ranks(train, 1, *words, init=False)
