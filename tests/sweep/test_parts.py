"""The parts of a sweep, each alone: device slots, search spaces, the trial log, TensorBoard's HParams."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams import metadata

from tests.runs import settings
from trainer.config.overrides import set_to
from trainer.errors import UserError
from trainer.sweep import hparams, picture, results, trial_log
from trainer.sweep.devices import Slots
from trainer.sweep.picture import Axis
from trainer.sweep.search import GridSearch, OptunaSearch
from trainer.sweep.settings import SweepConfig
from trainer.sweep.space import Choice, Interval, grid, split
from trainer.sweep.trial_log import FILE, Trial, TrialLog, read_trials


def test_each_trial_has_gpus_of_its_own() -> None:
    slots, two = Slots("auto", ["0", "1", "5", "7"]), settings("launch=local", "launch.processes=2")
    assert [slots.take(two), slots.take(two), slots.take(two)] == [["0", "1"], ["5", "7"], None]
    slots.give_back(["5", "7"])
    assert slots.take(settings()) == ["5"]
    assert slots.take(two) is None, "one is free, and two are wanted"


def test_a_number_is_kept_to_and_gpus_are_shared_evenly() -> None:
    slots = Slots("3", ["0", "1"])
    assert [slots.take(settings()) for _ in range(4)] == [["0"], ["1"], ["0"], None]


@pytest.mark.slow
def test_without_gpus_trials_come_one_at_a_time_or_as_told() -> None:
    one, three = Slots("auto", []), Slots("3", [])
    assert [one.take(settings()), one.take(settings())] == [[], None]
    assert [three.take(settings()) for _ in range(4)] == [[], [], [], None]
    assert Slots("auto", []).at_a_time(settings("launch=slurm")) == 16


def parsed(*overrides: str) -> tuple[list[str], list[Choice | Interval]]:
    return split(OverridesParser.create().parse_overrides(list(overrides)))


def test_hydras_syntax_becomes_a_space() -> None:
    common, space = parsed(
        "seed=3",
        "~model.hidden",
        "optim.lr=tag(log,interval(0.001,1))",
        "train.epochs=range(1,7,2)",
        "model.depth=int(interval(1,4))",
        "strategy=ddp,fsdp",
        "a=[1,2],'x,y',null",
    )
    assert common == ["seed=3", "~model.hidden"]
    assert space == [
        Interval("optim.lr", 0.001, 1, log=True),
        Choice("train.epochs", ("1", "3", "5"), ordered=True),
        Interval("model.depth", 1, 4, log=False),
        Choice("strategy", ("ddp", "fsdp"), ordered=False),
        Choice("a", ("[1,2]", "'x,y'", "null"), ordered=False),
    ]
    assert isinstance(space[2], Interval) and isinstance(space[2].low, int)
    assert list(grid([space[1], space[3]]))[:3] == [
        ["train.epochs=1", "strategy=ddp"],
        ["train.epochs=1", "strategy=fsdp"],
        ["train.epochs=3", "strategy=ddp"],
    ]
    assert len(GridSearch([space[1], space[3]], trials=4).combinations) == 4


def test_what_was_searched_by_log_is_drawn_on_a_log_scale(tmp_path: Path) -> None:
    """Also within a decade, in both pictures."""
    narrow = ["0.1", "0.4", "0.2"]
    assert [Axis(narrow).log, Axis(narrow, True).log, Axis(["0", "1"], True).log] == [False, True, False]
    assert Axis(narrow, True).unit() == pytest.approx([0, 1, 0.5])
    space = [Interval("optim.lr", 0.1, 0.4, log=True), Interval("model.depth", 1, 4, log=False)]
    pytest.importorskip("optuna")
    wanted = SweepConfig(search="random", trials=None, metric="eval/loss", mode="min")
    search = OptunaSearch(wanted, space, tmp_path, seed=0)
    assert (search.by_log, GridSearch([], None).by_log) == ({"optim.lr"}, frozenset())
    trials = [
        Trial(n, (), None, str(n), {"optim.lr": lr, "model.depth": "1"}, trial_log.DONE, value=n)
        for n, lr in enumerate(narrow)
    ]
    scales: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.axes.Axes.set_xscale", lambda axes, scale: scales.append(scale))
        assert picture.draw(tmp_path / "log.png", trials, wanted, search.by_log)
        assert picture.draw(tmp_path / "plain.png", trials, wanted)
    assert scales == ["log"] and (tmp_path / "log.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("a=interval(2,1)", "must go from a number to a larger one"),
        ("a=tag(log,interval(0,1))", "both above 0"),
        ("a=tag(fast,interval(0,1))", "is tagged fast; the only tag is log"),
    ],
)
def test_a_space_that_is_none_is_refused(override: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parsed(override)


def test_the_ledger_outlives_a_torn_line_and_keeps_numbers(tmp_path: Path) -> None:
    trial_log = TrialLog(tmp_path)
    first, second = (trial_log.trial(["a=1"], [f"b={b}"], seed=0) for b in ("[1,2]", "x/y"))
    assert [first.folder, second.folder] == ["000_b-1-2", "001_b-x-y"]
    for trial in (first, second):
        trial.state = "running"
        trial_log.write(trial)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"trial": 1, "state": "do')
    again = TrialLog(tmp_path)
    found = again.trial(["a=1"], ["b=x/y"], seed=0)
    assert (found.number, found.state) == (1, "running")
    found.state = "done"
    again.write(found)
    assert [trial.state for trial in read_trials(tmp_path)] == ["running", "done"]
    assert TrialLog(tmp_path).trial(["b=x/y"], ["a=1"], seed=0).number == 1, "in whatever order"
    assert TrialLog(tmp_path).trial(["b=x/y", "seed=0"], ["a=1"], seed=0).number == 1, "by whatever word"
    assert again.trial(["a=1"], ["b=x/y"], seed=1).number == 2, "another seed is another trial"


def test_a_column_is_of_one_type_so_that_no_trial_is_hidden() -> None:
    assert hparams.one_type([1, 0.5]) == [1.0, 0.5]
    assert hparams.one_type([True, False]) == [True, False]
    assert hparams.one_type([1, None]) == ["1", "null"]
    assert hparams.one_type([[64, 64], [8]]) == ["[64, 64]", "[8]"]
    assert hparams.one_type([1, float("nan")]) == ["1", "nan"]


def test_tensorboard_is_told_once_in_the_trials_own_folder(tmp_path: Path) -> None:
    trials = [
        Trial(number, (f"optim.clip={value}",), 0, f"00{number}", {"optim.clip": value}, "done", 0, 0.5)
        for number, value in enumerate(("1.5", "null"))
    ]
    for trial in trials:
        (tmp_path / trial.folder / "tensorboard").mkdir(parents=True)
    for _ in range(2):  # a resumed sweep reports again
        hparams.write(tmp_path, trials, "eval/loss")
    for trial, expected in zip(trials, ("1.5", "null"), strict=True):
        (file,) = (tmp_path / trial.folder / "tensorboard").iterdir()
        values = [value for event in EventFileLoader(str(file)).Load() for value in event.summary.value]
        expected_tags = [metadata.EXPERIMENT_TAG, metadata.SESSION_START_INFO_TAG, "sweep/eval/loss"]
        assert [value.tag for value in values] == expected_tags
        told = metadata.parse_session_start_info_plugin_data(values[1].metadata.plugin_data.content)
        assert told.hparams["optim.clip"].string_value == expected
        assert told.group_name == trial.folder


def test_any_path_survives_the_command_line() -> None:
    for path in ("runs/x-1.5", "my dir/it's, a=b", "[0]"):
        assert settings(set_to("run_dir", path)).run_dir == path


def test_a_trial_whose_metric_is_nan_comes_last() -> None:
    values = [0.5, math.nan, 0.1, None, 0.05]
    trials = [
        Trial(number, (), None, "", state=trial_log.DONE, value=value) for number, value in enumerate(values)
    ]
    settings = SimpleNamespace(sign=1)
    ordered = sorted(trials, key=lambda trial: results._order(trial, settings))  # type: ignore[arg-type]
    assert [trial.number for trial in ordered] == [4, 2, 0, 1, 3]
