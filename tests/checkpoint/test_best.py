"""The best checkpoint is the best of the current state's ancestors, however the run was stopped."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.failure_parts import InjectedError, inject
from tests.ranks import run_ranks
from tests.runs import train
from trainer.checkpoint.evaluations import Evaluations, State
from trainer.checkpoint.finding import candidates
from trainer.config import KeepBest
from trainer.config.saved_run import saved_settings
from trainer.run_dir.metrics_file import read_metrics

WORST = "checkpoint.keep_best={metric: eval/loss, mode: max}"  # the first evaluation's, which is pruned if forgotten
EVALUATED = ("train.eval_every_steps=4", "train.eval_every_epochs=0", WORST, "checkpoint.keep_last=1")
RUN = (
    "strategy=single",
    "logger=jsonl",
    "model.hidden=[8]",
    "train.global_batch_size=64",
    "train.max_steps=10",
)
RUN += ("checkpoint.every_epochs=null", "train.log_every_steps=1", *EVALUATED)


def _best(run_dir: Path) -> str:
    return candidates(run_dir, None, "best", saved_settings(run_dir, []).checkpoint)[0].name


def _stopped_and_resumed(root: Path) -> None:
    """Stop in an evaluation whose step is saved already, and again right after the resume."""
    words = (*RUN, f"run_dir={root / 'run'}", "resume=auto", "checkpoint.every_steps=4")
    for phase, step in (("evaluate", 4), ("forward", 6), ("checkpoint", 8)):
        with pytest.raises(InjectedError):
            train(*words, "checkpoint.on_failure=true", *inject("raise", rank=0, step=step, phase=phase))
    train(*words)
    train(*words)


@pytest.mark.slow
def test_an_interrupted_run_keeps_the_best_checkpoint_and_evaluates_each_state_once(tmp_path: Path) -> None:
    run_ranks(_stopped_and_resumed, 1, tmp_path, init=False)
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [*range(1, 11)]
    evaluated = read_metrics(tmp_path / "run")["eval/loss"]
    assert list(evaluated) == [4, 8, 10] and max(evaluated, key=evaluated.__getitem__) == 4
    assert _best(tmp_path / "run") == "step_00000004"
    assert (tmp_path / "run" / "train.log").read_text().count("eval at step 10") == 1


def _apart_lost_and_branched(root: Path) -> list[Any]:
    settings = ("checkpoint.keep_best={metric: eval/loss, mode: min}", "checkpoint.keep_every=4")
    words = (*RUN, *settings, "checkpoint.every_steps=5", f"run_dir={root}/run")
    train(*words, f"checkpoint.remote=file://{root}/remote")
    saved = sorted(path.name for path in (root / "run" / "checkpoints").iterdir())
    shutil.rmtree(root / "run" / "checkpoints" / "step_00000010")
    at_remote = candidates(root / "run", None, "best", saved_settings(root / "run", []).checkpoint)
    begin = f"resume={root}/run/checkpoints/step_00000004"
    train(*words, begin, "optim.lr=0.01", "train.max_steps=8")
    return [saved, str(at_remote[0]), _best(root / "run")]


@pytest.mark.slow
def test_the_best_evaluation_is_saved_found_at_the_remote_and_of_the_current_branch(tmp_path: Path) -> None:
    saved, at_remote, of_branch = run_ranks(_apart_lost_and_branched, 1, tmp_path, init=False)[0]
    assert saved == ["step_00000004", "step_00000008", "step_00000010"], (
        "4 and 8 only because they were the best"
    )
    assert at_remote == f"file://{tmp_path}/remote/checkpoints/step_00000010"
    assert of_branch == "step_00000008-2", "10 has a lower loss, but is no ancestor"


def _set_later(root: Path) -> list[str]:
    """Evaluate step 4 and save step 5; set keep_best at the next launch, and a remote at the one after it."""
    words = (*RUN, f"run_dir={root / 'run'}", "resume=auto")
    with pytest.raises(InjectedError):
        train(
            *words, "checkpoint.keep_best=null", "checkpoint.every_steps=5", *inject("raise", rank=0, step=7)
        )
    train(*words)
    train(*words, "train.max_steps=12", f"checkpoint.remote=file://{root}/remote")
    return [_best(root / "run"), *sorted(path.name for path in (root / "remote" / "checkpoints").iterdir())]


@pytest.mark.slow
def test_the_best_state_that_can_be_saved_is_kept_and_copied(tmp_path: Path) -> None:
    """Step 4 was better but was not saved, so step 8 is saved, and later copied to the remote."""
    best, *at_remote = run_ranks(_set_later, 1, tmp_path, init=False)[0]
    assert best == "step_00000008" and at_remote == ["step_00000008", "step_00000012"]


def test_only_evaluations_of_ancestors_count(tmp_path: Path) -> None:
    record, low = Evaluations(tmp_path), KeepBest("loss", "min")
    for branch, origin, scores in (
        ("a", None, {2: 5.0, 4: 1.0, 6: float("nan")}),
        ("b", State("a", 2), {2: 4.0, 4: 3.0}),  # 2: the evaluation of what a saved
        ("c", State("b", 4), {6: 3.0}),
    ):
        if origin is not None:
            record.start_branch(branch, origin)
        for step, score in scores.items():
            record.add(State(branch, step), {"loss": score})
    record.write()
    found = Evaluations.read(tmp_path)
    assert found.of(State("c", 2)) == found.of(State("a", 2)) == {"loss": 4.0}
    assert found.best(State("a", 6), low) == State("a", 4)
    assert found.best(State("c", 6), low) == State("b", 4), "the earliest of equals"
    assert found.best(State("c", 6), low, [State("a", 2), State("a", 4), State("c", 6)]) == State("c", 6)
    assert found.best(State("b", 3), low) == State("a", 2)
    assert found.best(State("c", 6), KeepBest("accuracy", "max")) is None
