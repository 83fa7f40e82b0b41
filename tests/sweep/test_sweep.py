"""A sweep from its command line to its end, with simulated trials."""

from __future__ import annotations

import csv
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs import finish
from tests.sweep.fake import Sweep


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return Sweep(tmp_path)


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 200
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.slow
def test_a_grid_runs_in_separate_launches_and_a_second_call_skips_it(sweep: Sweep) -> None:
    command = ["optim.lr=0.1,0.01", "model.hidden=[8],[16,16]", "train.max_steps=3"]
    ended = sweep.run(*command)
    assert ended.code == 0, ended.output
    starts = sweep.starts()
    expected = ["000_lr-0.1_hidden-8", "001_lr-0.1_hidden-16-16"]
    assert list(starts) == [*expected, "002_lr-0.01_hidden-8", "003_lr-0.01_hidden-16-16"]
    for folder, (start,) in starts.items():
        assert start["sid"] == start["pid"], "not a session of its own"
        assert start["argv"][-1] == f"run_dir={sweep.folder / folder}"
        assert start["argv"][0] == "train.max_steps=3"
        assert start["full_error"] == "0", "a mistake would end as a fault, with a traceback"
    assert [line.split()[0] for line in ended.stdout.partition("\ntrial ")[2].splitlines()[1:3]] == [
        "002_lr-0.01_hidden-8",  # the best first: 0.01 is nearer to 0.03
        "003_lr-0.01_hidden-16-16",
    ]
    with (sweep.folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 and rows[0]["optim.lr"] == "0.01" and rows[0]["param_sha256"] == "abc"
    assert (sweep.folder / "results.png").stat().st_size > 10_000

    again = sweep.run(*reversed(command))
    assert again.code == 0 and "earlier trials: 4 done" in again.stdout
    assert {folder: len(runs) for folder, runs in sweep.starts().items()} == dict.fromkeys(starts, 1)


@pytest.mark.slow
def test_a_stop_saves_every_running_trial(sweep: Sweep) -> None:
    """The guard in tests.conftest fails this test if a trial outlives the sweep."""
    command, acts = ["optim.lr=0.1,0.2,0.3", "hydra.sweeper.concurrent=2"], ["wait", "done"]
    by_lr = {f"optim.lr=0.{n}": acts for n in (1, 2)}
    with sweep.started(*command, acts=by_lr) as program:
        wait_until(lambda: len(list(sweep.folder.glob("*/ready"))) == 2, "two trials begin")
        program.send_signal(signal.SIGTERM)
        ended = program.wait()
    assert ended.code == 75, ended.output
    assert set(sweep.states().values()) == {"stopped"}
    again = sweep.run(*command, acts=by_lr)
    assert again.code == 0, again.output
    assert [len(runs) for runs in sweep.starts().values()] == [2, 2, 1]
    assert all(runs[-1]["argv"][-1] == "resume=auto" for runs in list(sweep.starts().values())[:2])
    assert set(sweep.states().values()) == {"done"}


@pytest.mark.slow
def test_a_second_sweep_in_the_same_folder_is_refused(sweep: Sweep) -> None:
    with sweep.started("optim.lr=0.1", acts={"optim.lr=0.1": ["wait"]}):
        wait_until(lambda: bool(list(sweep.folder.glob("*/ready"))), "the trial begins")
        second = sweep.run("optim.lr=0.1")
        assert second.code == 2 and "another sweep is running in hydra.sweep.dir" in second.stderr


@pytest.mark.parametrize(
    ("override", "words"),
    [
        pytest.param("strategy=fsdp comm=ring,tree", "comm=tree needs strategy=ddp", marks=pytest.mark.slow),
        ("hydra.sweeper.serch=tpe", "did you mean hydra.sweeper.search?"),
        pytest.param(
            "launch=local launch.processes=5", "is not divisible by the 5 replicas", marks=pytest.mark.slow
        ),
        pytest.param("optim=sgd,adamw optim.mumentum=1,2", "optim.mumentum is not", marks=pytest.mark.slow),
        pytest.param(
            "hydra/launcher=joblib", "each trial of a sweep is launched separately", marks=pytest.mark.slow
        ),
        pytest.param("run_dir=here", "would be the directory of every trial", marks=pytest.mark.slow),
        pytest.param(
            "launch=slurm launch.wait=false", "a sweep waits for each trial", marks=pytest.mark.slow
        ),
    ],
)
def test_refuses(sweep: Sweep, override: str, words: str) -> None:
    ended = sweep.run("train.max_steps=3,4", *override.split())
    assert (ended.code, words in ended.stderr) == (2, True), ended.output
    assert not list(sweep.folder.glob("*/start-*"))


@pytest.mark.slow
def test_settings_that_only_some_choices_have_and_params_from_a_file(sweep: Sweep) -> None:
    """adamw has no momentum, so it is tried once; the command line takes precedence over the file."""
    (sweep.tmp_path / "experiment").mkdir()
    params = {"optim": "sgd,adamw", "optim.momentum": "0.8,0.9", "train.max_steps": 5}
    hydra = {"mode": "MULTIRUN", "sweeper": {"params": params}}
    text = f"# @package _global_\n{json.dumps({'hydra': hydra})}"
    (sweep.tmp_path / "experiment/mine.yaml").write_text(text)
    ended = sweep.run("experiment=mine", "train.max_steps=3", f"--config-dir={sweep.tmp_path}")
    assert ended.code == 0, ended.output
    starts = sweep.starts()
    assert list(starts) == ["000_optim-sgd_momentum-0.8", "001_optim-sgd_momentum-0.9", "002_optim-adamw"]
    (adamw,) = starts["002_optim-adamw"]
    own = [word for word in adamw["argv"] if not word.startswith(("--config-dir", "run_dir"))]
    assert sorted(own) == ["experiment=mine", "hydra.mode=RUN", "optim=adamw", "train.max_steps=3"]


@pytest.mark.slow
def test_a_pruned_trial_saves_and_is_not_resumed(sweep: Sweep) -> None:
    pytest.importorskip("optuna")
    command, acts = ["optim.lr=0.01,0.5,0.02", "hydra.sweeper.pruning=asha"], {"optim.lr=0.5": ["wait"]}
    ended = sweep.run(*command, acts=acts)
    assert ended.code == 0, ended.output
    assert "001_lr-0.5 pruned at step 1: eval/loss 5, " in ended.stdout
    assert list(sweep.states().values()) == ["done", "pruned", "done"]
    assert (sweep.folder / "001_lr-0.5/checkpoints/step_00000001").exists(), "it was killed"
    with (sweep.folder / "results.csv").open() as file:
        assert [row["pruned_at"] for row in csv.DictReader(file)] == ["", "", "1"]
    again = sweep.run(*command, acts=acts)
    assert again.code == 0 and [len(runs) for runs in sweep.starts().values()] == [1, 1, 1]
    wrong = sweep.run(*command, "hydra.sweeper.metric=eval/accuracy", "seed=1", acts=acts)
    assert wrong.code == 2 and "metric is eval/accuracy, but the trials logged only eval/loss" in wrong.stderr


@pytest.mark.slow
def test_a_killed_search_can_be_continued(sweep: Sweep) -> None:
    """Uses TPE. A trial that outlives the sweep fails this test."""
    pytest.importorskip("optuna")
    command = ["optim.lr=tag(log,interval(0.001,1))", "train.max_steps=range(3,9,3)", "model.hidden=[8],[16]"]
    command += ["hydra.sweeper.search=tpe", "hydra.sweeper.trials=5"]
    with sweep.started(
        *command, acts={"train.max_steps=3": ["wait", "done"], "train.max_steps=6": ["wait", "done"]}
    ) as program:
        wait_until(lambda: len(list(sweep.folder.glob("*/ready"))) == 1, "the trial begins")
        program.send_signal(signal.SIGKILL)
        program.wait()
    assert list(sweep.states().values()) == ["running"]
    ended = sweep.run(*command)
    assert ended.code == 0, ended.output
    assert list(sweep.states().values()) == ["done"] * 5
    assert [len(runs) for runs in sweep.starts().values()] == [2, 1, 1, 1, 1]


@pytest.mark.slow
def test_a_trial_equals_a_single_run(tmp_path: Path) -> None:
    """A small real sweep: one trial, and the same run without a sweep."""
    command = ["train.max_steps=3", "model.hidden=[8]", "train.eval_every_epochs=0"]
    ended = finish("train.py", "-m", *command, "optim.lr=0.2", f"hydra.sweep.dir={tmp_path}/s", forks=True)
    assert ended.code == 0, ended.output
    alone = finish("train.py", *command, "optim.lr=0.2", f"run_dir={tmp_path}/alone")
    assert alone.code == 0
    found = [json.loads((tmp_path / where / "result.json").read_text()) for where in ("alone", "s/000")]
    assert found[0]["param_sha256"] == found[1]["param_sha256"]
