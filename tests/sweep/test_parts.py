"""The parts of a sweep, each alone: device slots, search spaces, the trial log, TensorBoard's HParams."""

from __future__ import annotations

import dataclasses
import math
import subprocess
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams import metadata

from tests.runs import settings
from trainer.config.overrides import set_to
from trainer.errors import UserError
from trainer.launch import fresh
from trainer.sweep import report
from trainer.sweep.devices import Slots
from trainer.sweep.runner import Runner
from trainer.sweep.search import Choice, GridSearch, Interval, OptunaSearch, Proposal, Setting, split
from trainer.sweep.settings import SweepConfig
from trainer.sweep.trials import DONE, FAILED, FILE, STOPPED, Trial, TrialLog, read_trials

RANDOM = SweepConfig(search="random", trials=4, metric="eval/loss", mode="min", concurrent="1", seeds=1)


def take(slots: Slots, *overrides: str) -> list[str] | None:
    if (gpus := slots.free(settings(*overrides))) is not None:
        slots.take(gpus)
    return gpus


def test_each_trial_has_gpus_of_its_own() -> None:
    slots, two = Slots("auto", ["0", "1", "5", "7"]), ("launch=local", "launch.processes=2")
    assert [take(slots, *two), take(slots, *two), take(slots, *two)] == [["0", "1"], ["5", "7"], None]
    slots.give_back(["5", "7"])
    assert take(slots) == ["5"]
    assert take(slots, *two) is None, "one is free, and two are wanted"


def test_a_number_is_kept_to_and_gpus_are_shared_evenly() -> None:
    slots = Slots("3", ["0", "1"])
    assert [take(slots) for _ in range(4)] == [["0"], ["1"], ["0"], None]


def test_without_gpus_trials_come_one_at_a_time_or_as_told() -> None:
    one, three, jobs = Slots("auto", []), Slots("3", []), Slots("auto", [])
    assert [take(one), take(one)] == [[], None]
    assert [take(three) for _ in range(4)] == [[], [], [], None]
    assert [take(jobs, "launch=slurm") for _ in range(17)] == [*[[]] * 16, None]


def test_a_search_knows_each_result_before_it_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class Recorded:
        def ask(self) -> Proposal | None:
            calls.append("ask")
            return Proposal((f"optim.lr={len(calls)}",)) if len(calls) < 4 else None

        def tell(self, proposal: Proposal, value: float | None) -> None:
            calls.append("tell")

        def num_left(self) -> int:
            return 1

    monkeypatch.setattr(fresh, "start", lambda *_, **__: subprocess.Popen(["true"]))
    log = TrialLog(tmp_path, [], "eval/loss")
    runner = Runner(dataclasses.replace(RANDOM, search="grid"), Recorded(), log, [], lambda _: settings())
    assert runner.run() == 0
    assert calls == ["ask", "tell", "ask", "tell", *["ask"] * (len(calls) - 4)] and len(log.trials) == 2


def parsed(*overrides: str) -> tuple[list[str], list[Setting]]:
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
    assert list(GridSearch([space[1], space[3]], trials=3).combinations) == [
        ("train.epochs=1", "strategy=ddp"),
        ("train.epochs=1", "strategy=fsdp"),
        ("train.epochs=3", "strategy=ddp"),
    ]


def test_a_search_learns_from_the_trial_log(tmp_path: Path) -> None:
    """What is done is told to Optuna; what was stopped comes first; other values, or settings, count for nothing."""
    pytest.importorskip("optuna")
    common, space = parsed(
        "seed=0", "lr=tag(log,interval(0.001,1))", "depth=range(1,7,2)", "n=int(interval(1,4))", "a=[1],'x,y'"
    )
    log = TrialLog(tmp_path, common, "eval/loss")
    for lr, state, value in (
        ("0.1", DONE, 0.5),
        ("0.2", STOPPED, None),
        ("0.3", FAILED, None),
        ("9", DONE, 0.1),
    ):
        trial = log.trial([f"lr={lr}", "depth=3", "n=2", "a='x,y'"], seed=0)
        trial.state, trial.value = state, value
    other = TrialLog(tmp_path, ["seed=0", "train.max_steps=2"], "eval/loss")
    log.trials |= {
        trial.key: trial for trial in [other.trial(["lr=0.4", "depth=3", "n=2", "a='x,y'"], seed=0)]
    }
    search = OptunaSearch(RANDOM, space, log, seed=0)
    assert [trial.value for trial in search._study.get_trials() if trial.value is not None] == [0.5]
    assert search.num_left() == 2, "of 4, two have ended"
    first, second = search.ask(), search.ask()
    assert first is not None and first.overrides == ("lr=0.2", "depth=3", "n=2", "a='x,y'")
    assert second is not None and second.overrides != first.overrides and search.ask() is None
    search.tell(first, 0.25)
    search.tell(second, None)
    assert search._study.best_value == 0.25


def test_the_picture_shows_numbers_and_words(tmp_path: Path) -> None:
    """On a log scale if they span a decade."""
    trials = [
        Trial(n, (), None, str(n), {"lr": lr, "model": word, "depth": "1"}, DONE, value=n)
        for n, (lr, word) in enumerate([("0.01", "[8]"), ("0.4", "[9]"), ("0.2", "[8]")])
    ]
    scales: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.axes.Axes.set_xscale", lambda axes, scale: scales.append(scale))
        assert report.draw(tmp_path / "results.png", trials, RANDOM)
    assert scales == ["log"] and (tmp_path / "results.png").stat().st_size > 5000
    assert not report.draw(tmp_path / "one.png", trials[:1], RANDOM)


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


def test_the_trial_log_outlives_a_torn_line_and_keeps_numbers(tmp_path: Path) -> None:
    def opened(*common: str) -> TrialLog:
        return TrialLog(tmp_path, common, "eval/loss")

    log = opened("a=1")
    first, second = (log.trial([f"b={b}"], seed=0) for b in ("[1,2]", "x/y"))
    assert [first.folder, second.folder] == ["000_b-1-2", "001_b-x-y"]
    for trial in (first, second):
        trial.state = "running"
        log.write(trial)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"trial": 1, "state": "do')
    again = opened("a=1")
    found = again.trial(["b=x/y"], seed=0)
    assert (found.number, found.state) == (1, "running")
    found.state = "done"
    again.write(found)
    assert [trial.state for trial in read_trials(tmp_path)] == ["running", "done"]
    assert opened("b=x/y").trial(["a=1"], seed=0).number == 1, "in whatever order"
    assert opened("b=x/y", "seed=0").trial(["a=1"], seed=0).number == 1, "by whatever word"
    other = again.trial(["b=x/y"], seed=1, repeated=True)
    assert (other.number, other.folder) == (2, "002_b-x-y_seed-1"), "another seed is another trial"
    (tmp_path / FILE).write_text("[1]\n")
    with pytest.raises(UserError, match="line 1 is not a trial of a sweep"):
        read_trials(tmp_path)


def test_a_column_is_of_one_type_so_that_no_trial_is_hidden() -> None:
    assert report.one_type([1, 0.5]) == [1.0, 0.5]
    assert report.one_type([True, False]) == [True, False]
    assert report.one_type([1, None]) == ["1", "null"]
    assert report.one_type([[64, 64], [8]]) == ["[64, 64]", "[8]"]
    assert report.one_type([1, float("nan")]) == ["1", "nan"]


def test_tensorboard_is_told_once_in_the_trials_own_folder(tmp_path: Path) -> None:
    trials = [
        Trial(number, (f"optim.clip={value}",), 0, f"00{number}", {"optim.clip": value}, "done", 0, 0.5)
        for number, value in enumerate(("1.5", "null"))
    ]
    for trial in trials:
        (tmp_path / trial.folder / "tensorboard").mkdir(parents=True)
    for _ in range(2):  # a resumed sweep reports again
        report.write_hparams(tmp_path, trials, "eval/loss")
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
    trials = [Trial(number, (), None, "", state=DONE, value=value) for number, value in enumerate(values)]
    ordered = sorted(trials, key=lambda trial: report.order(trial, RANDOM))
    assert [trial.number for trial in ordered] == [4, 2, 0, 1, 3]
