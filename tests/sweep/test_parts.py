"""Unit tests of sweeps: device slots, search spaces, the trial log, TensorBoard's HParams."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams import metadata

from tests.runs import settings
from trainer.config import Config
from trainer.config.overrides import set_to
from trainer.errors import UserError
from trainer.launch import new_process
from trainer.sweep import results
from trainer.sweep.pruning import Pruning
from trainer.sweep.runner import Runner, room
from trainer.sweep.search import SweepConfig, grid, suggestions, with_settings
from trainer.sweep.trials import (
    DONE,
    FAILED,
    PRUNED,
    STOPPED,
    Combination,
    Trial,
    TrialLog,
    read_trials,
    words_of,
)

GRID = SweepConfig(search="grid", trials=None, metric="eval/loss", mode="min", concurrent="1", seeds=1)
RANDOM = dataclasses.replace(GRID, search="random", trials=4)


def gpus_of_trials(concurrent: str, gpus: list[str], *trials: list[str]) -> list[list[str] | None]:
    """Return the GPUs of trials with these overrides, which are started one after another and keep running."""
    found: list[list[str] | None] = []
    for overrides in trials:
        found.append(
            room(settings(*overrides), concurrent, gpus, [each for each in found if each is not None])
        )
    return found


def test_trials_get_separate_gpus_or_the_configured_concurrency() -> None:
    one, two = list[str](), ["launch=local", "launch.processes=2"]
    assert gpus_of_trials("auto", ["0", "1", "5", "7"], two, two, two) == [["0", "1"], ["5", "7"], None]
    assert gpus_of_trials("auto", ["0", "1", "5"], two, two, one) == [["0", "1"], None, ["5"]]
    assert gpus_of_trials("3", ["0", "1"], one, one, one, one) == [["0"], ["1"], ["0"], None]
    assert gpus_of_trials("auto", [], one, one) == [[], None]
    assert gpus_of_trials("2", [], one, one, one) == [[], [], None]
    assert gpus_of_trials("auto", [], *[["launch=slurm"]] * 17) == [*[[]] * 16, None]


# What the trials of `log` do before they end.
BEFORE: dict[str, str] = {}


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialLog:
    """Yield the log of trials that print an error message; a trial with optim.lr=N ends with status N."""

    def start(argv: list[str], *, stdout: IO[bytes], **_: object) -> subprocess.Popen[bytes]:
        given = dict(word.partition("=")[::2] for word in argv)
        act = BEFORE.get(lr := given["optim.lr"], "")
        return subprocess.Popen(
            ["sh", "-c", f"{act}\necho why; echo '  see'; exit {lr}"],
            stdout=stdout,
            cwd=given["run_dir"],
        )

    monkeypatch.setattr(new_process, "start", start)
    return TrialLog(tmp_path, [], "eval/loss")


def runner(log: TrialLog, *lrs: int, wanted: SweepConfig = GRID) -> Runner:
    return Runner(wanted, iter([({"optim.lr": str(lr)}, settings()) for lr in lrs]), log, [])


def states(log: TrialLog) -> list[str]:
    assert [trial.state for trial in read_trials(log.folder)] == [
        trial.state for trial in log.trials.values()
    ]
    return [trial.state for trial in log.trials.values()]


def test_a_search_proposes_a_trial_only_after_the_previous_result(log: TrialLog) -> None:
    def search() -> Iterator[tuple[Combination, Config]]:
        for number in range(3):
            assert [trial.state for trial in log.trials.values()] == [DONE] * number
            yield {"optim.lr": "0", "train.epochs": str(number)}, settings()

    assert Runner(GRID, search(), log, []).run() == 0
    assert len(log.trials) == 3


def test_unsuccessful_ends_of_trials(log: TrialLog, capsys: pytest.CaptureFixture[str]) -> None:
    """A trial that diverged is final; one that died runs again."""
    assert runner(log, 0, 3, 1).run() == 1
    assert states(log) == [DONE, FAILED, "died"]
    assert "001_lr-3 failed (status 3): why " in capsys.readouterr().out
    assert runner(log, 0, 3, 1).run() == 1
    said = capsys.readouterr().out
    assert "002_lr-1 died" in said and "000_lr-0 done" not in said and "001_lr-3 failed (" not in said


def test_the_reason_of_a_failed_trial_is_in_its_failure_json(
    log: TrialLog, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line of output may be about the save that follows an error. An old failure.json doesn't count."""
    failure = json.dumps({"status": 1, "message": "ValueError: boom"})
    monkeypatch.setitem(BEFORE, "1", f"[ -e failure.json ] || echo '{failure}' > failure.json")
    monkeypatch.setitem(BEFORE, "5", "kill -9 $$")
    assert runner(log, 1, 5).run() == 1
    said = capsys.readouterr().out
    assert "000_lr-1 died (status 1): ValueError: boom  (" in said
    assert (
        "001_lr-5 died (status -9): killed by SIGKILL; the last line of its output is: no output  (" in said
    )
    with (log.folder / "results.csv").open() as file:
        assert [row["reason"][:10] for row in csv.DictReader(file)] == ["ValueError", "killed by "]
    assert runner(log, 1).run() == 1
    assert "000_lr-1 died (status 1): why  (" in capsys.readouterr().out


@pytest.mark.parametrize("wanted", [GRID, RANDOM])
def test_a_trial_with_a_nan_evaluation_is_not_best_and_the_sweep_continues(
    wanted: SweepConfig, log: TrialLog, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for lr, last in (("0", "null"), ("00", "0.5")):
        rows = f'{{"step": 1, "eval/loss": 0.1}}\n{{"step": 2, "eval/loss": {last}}}'
        monkeypatch.setitem(BEFORE, lr, f"echo '{rows}' > metrics.jsonl")
    search = iter([({"optim.lr": lr}, settings()) for lr in ("0", "00")])
    assert Runner(wanted, search, log, []).run() == 0
    said = capsys.readouterr().out
    assert "000_lr-0 done: eval/loss nan, " in said and "001_lr-00 done: eval/loss 0.5, " in said
    rows = [line.split() for line in said.splitlines() if line.endswith("  done")]
    assert [row[2] for row in rows] == ["0.5", "nan"]
    assert [trial.value for trial in read_trials(log.folder)] == [None, 0.5]


def test_an_invalid_trial_is_skipped_until_its_folder_is_deleted(
    log: TrialLog, capsys: pytest.CaptureFixture[str]
) -> None:
    refused: tuple[Combination, str] = {"optim.lr": "9"}, "too large"

    def again() -> tuple[int, str]:
        now = TrialLog(log.folder, [], "eval/loss")
        search = iter([({"optim.lr": str(lr)}, settings()) for lr in (2, 0)] + [refused])
        status = Runner(GRID, search, now, []).run()
        assert states(now) == ["invalid", DONE, "invalid"]
        return status, capsys.readouterr().out

    status, said = again()
    assert status == 2 and "000_lr-2 invalid (status 2): why " in said
    assert "2 of 3 trials are invalid" in said and "  optim.lr=2: why\n  optim.lr=9: too large" in said
    status, said = again()
    assert status == 2 and "000_lr-2 invalid (status" not in said and "  optim.lr=2: why" in said
    shutil.rmtree(log.folder / "000_lr-2")
    assert "000_lr-2 invalid (status 2)" in again()[1]


def test_an_error_in_all_trials_ends_the_sweep(log: TrialLog) -> None:
    """The swept value is wrong in all trials; once it is corrected, all trials run again."""
    same = [({"optim.lr": "2", "train.epochs": str(number)}, settings()) for number in range(4)]
    other = [({"optim.lr": lr, "train.epochs": "4"}, settings()) for lr in ("02", "002")]
    for _ in range(2):
        log = TrialLog(log.folder, [], "eval/loss")
        with pytest.raises(UserError, match="why; all trials so far ended with this message"):
            Runner(GRID, iter([*same, *other]), log, []).run()
        assert states(log) == ["invalid"] * 5
    assert (log.folder / "000_lr-2_epochs-0/output.log").read_text().count("why") == 2


def test_a_search_ends_at_the_first_trial_without_the_metric(log: TrialLog) -> None:
    with pytest.raises(UserError, match="metric is eval/loss, but the trials logged only"):
        runner(log, 0, 0, wanted=RANDOM).run()


def test_seeds_repeat_trials_and_report_mean_and_deviation(
    log: TrialLog, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = dataclasses.replace(GRID, seeds=3)
    assert runner(log, 0, wanted=wanted).run() == 0
    assert [trial.folder for trial in log.trials.values()] == [
        f"000_lr-0_seed-{n}".replace("000", f"00{n}") for n in range(3)
    ]
    for number, trial in enumerate(log.trials.values()):
        assert f"seed={number}" in trial.overrides
        trial.value = 0.1 * number
    rows = results.table(list(log.trials.values()), wanted).splitlines()
    assert rows[1].split() == ["0", "0.1", "0.1", "3", "of", "3"]


def test_contradictory_combinations_are_skipped_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    def compose(combination: Combination) -> tuple[Combination, Config]:
        return combination, settings(*words_of(combination))

    both = {"strategy": ["ddp", "fsdp"], "comm": ["native", "ring"]}
    combinations = [dict(zip(both, each, strict=True)) for each in itertools.product(*both.values())]
    *_, (_, refused) = found = list(with_settings([*combinations, *combinations], compose))
    assert len(found) == 4 and isinstance(refused, str)
    assert f"skipped: strategy=fsdp comm=ring: {refused}" in capsys.readouterr().out


def write_evaluations(folder: Path, *losses: float) -> None:
    """Write the files of a run with an evaluation every ten steps."""
    folder.mkdir(parents=True, exist_ok=True)
    values = [loss if math.isfinite(loss) else None for loss in losses]
    rows = [{"step": 10 * number, "eval/loss": loss} for number, loss in enumerate(values, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(("pruning", "pruned_at"), [("median", 20), ("asha", 10)])
def test_a_trial_is_pruned_by_other_trials_evaluations(pruning: str, pruned_at: int, tmp_path: Path) -> None:
    """Also by trials of an earlier start, in both modes; trials with other settings are ignored."""
    pytest.importorskip("optuna")
    for mode, sign in (("min", 1), ("max", -1)):
        folder, wanted = tmp_path / mode, dataclasses.replace(GRID, pruning=pruning, mode=mode)
        log = TrialLog(folder, ["a=1"], "eval/loss")
        for number in range(5):
            done = log.trial({"b": str(number)})
            done.state, done.value = DONE, 0.1 * sign
            write_evaluations(folder / done.folder, 0.5 * sign, 0.3 * sign, 0.1 * sign)
        diverged = log.trial({"b": "7"})
        write_evaluations(folder / diverged.folder, math.nan)
        assert Pruning(wanted, log).step_to_end_at(diverged) == 10
        del log.trials["a=1", "b=7"]
        other = TrialLog(folder, ["a=2"], "eval/loss").trial({"b": "1"})
        other.state, other.number, other.folder = DONE, 9, "other"
        log.trials["other",] = other
        write_evaluations(folder / "other", 0.01 * sign)
        good, bad = log.trial({"b": "8"}), log.trial({"b": "9"})
        pruner = Pruning(wanted, log)
        write_evaluations(folder / good.folder, 0.4 * sign)
        assert pruner.step_to_end_at(good) is None
        write_evaluations(folder / bad.folder, 0.5 * sign)
        assert pruner.step_to_end_at(bad) == (None if pruning == "median" else 10)
        write_evaluations(folder / bad.folder, 0.5 * sign, 0.4 * sign)
        good.state, good.value = DONE, 0.4 * sign
        assert Pruning(wanted, log).step_to_end_at(log.trial({"b": "9"})) == pruned_at


def parsed(*overrides: str) -> list[Override]:
    return OverridesParser.create().parse_overrides(list(overrides))


def test_a_grid_has_hydras_syntax() -> None:
    swept = parsed("train.epochs=range(1,7,2)", "a=[1,2],'x,y'")
    assert [words_of(each) for each in grid(swept)][:3] == [
        ["train.epochs=1", "a=[1,2]"],
        ["train.epochs=1", "a='x,y'"],
        ["train.epochs=3", "a=[1,2]"],
    ]
    with pytest.raises(UserError, match=r"a=interval\(\.\.\.\) has no grid"):
        grid(parsed("a=interval(0,1)"))


@pytest.mark.parametrize("search", ["random", "tpe"])
def test_a_search_uses_the_results_in_the_trial_log(
    search: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished trials are passed to Optuna, stopped ones come first, and other values or settings are ignored."""
    optuna = pytest.importorskip("optuna")
    space = parsed(
        "lr=tag(log,interval(0.001,1))", "depth=range(1,7,2)", "n=int(interval(1,4))", "a=[1],'x,y'"
    )
    log = TrialLog(tmp_path, ["seed=0"], "eval/loss")
    rest = {"depth": "3", "n": "2", "a": "'x,y'"}
    ends = (
        ("0.1", DONE, 0.5),
        ("0.2", STOPPED, 0),
        ("0.3", FAILED, 0),
        ("9", DONE, 0.1),
        ("0.5", PRUNED, 0.7),
    )
    for lr, state, value in ends:
        trial = log.trial({"lr": lr, **rest, "n": None} if state == PRUNED else {"lr": lr, **rest})
        trial.state, trial.value = state, value
        write_evaluations(tmp_path / trial.folder, 0.8, 0.7)
    other = TrialLog(tmp_path, ["seed=0", "train.max_steps=2"], "eval/loss").trial({"lr": "0.4", **rest})
    log.trials[("other",)] = other
    trials: list[tuple[float | None, dict[int, float], int]] = []
    add = optuna.Study.add_trial
    monkeypatch.setattr(
        optuna.Study,
        "add_trial",
        lambda study, trial: (
            trials.append((trial.value, trial.intermediate_values, len(trial.params))),
            add(study, trial),
        ),
    )
    first, second = suggestions(
        dataclasses.replace(RANDOM, search=search, trials=5), space, log, seed=0
    )  # of 5, four ran
    assert first == {"lr": "0.2", **rest}
    assert (
        trials == [(0.5, {}, 4), (None, {}, 4), (None, {}, 4), (None, {1: 0.8, 2: 0.7}, 3)]
        and second != first
    )
    assert second["depth"] in ("1", "3", "5") and second["n"] in ("1", "2", "3", "4")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("a=interval(2,1)", "a=interval.2,1.: .*low <= high"),
        ("a=tag(log,interval(0,1))", "low > 0"),
        ("a=tag(lgo,interval(1,2))", "the tag lgo is unknown; the only tag is log"),
    ],
)
def test_an_invalid_search_space_is_refused(override: str, words: str, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    with pytest.raises(UserError, match=words):
        next(suggestions(RANDOM, parsed(override), TrialLog(tmp_path, [], "eval/loss"), seed=0))


def test_the_trial_log_identifies_trials_by_their_overrides(tmp_path: Path) -> None:
    def opened(*common: str) -> TrialLog:
        return TrialLog(tmp_path, common, "eval/loss")

    log = opened("a=1")
    first, second = (log.trial({"b": b}) for b in ("[1,2]", "x/y"))
    assert [first.folder, second.folder] == ["000_b-1-2", "001_b-x-y"]
    assert TrialLog(tmp_path, [], "").trial({"a.lr": "0.015676676195506"}).folder == "000_lr-0.01568"
    first.state = second.state = "running"
    log.write()
    again = opened("a=1")
    found = again.trial({"b": "x/y"})
    assert (found.number, found.state) == (1, STOPPED), "the kill of the sweep killed it"
    found.state = DONE
    pruned = again.trial({"b": "[1,2]"})
    pruned.state, pruned.pruned_at = "running", 20
    again.write()
    assert opened("a=1").trial({"b": "[1,2]"}).state == PRUNED, "it was told to stop before the kill"
    assert [trial.state for trial in read_trials(tmp_path)] == ["running", DONE]
    assert opened("b=x/y").trial({"a": "1"}).number == 1, "in whatever order"
    assert again.trial({"b": "z"}).number == 2


def test_tensorboard_gets_hparams_once_in_the_trials_folder(tmp_path: Path) -> None:
    trials = [
        Trial(number, (), {"optim.clip": value}, f"00{number}", DONE, 0, 0.5)
        for number, value in enumerate(("1.5", "null"))
    ]
    for trial in trials:
        (tmp_path / trial.folder).mkdir()
    for _ in range(2):  # a resumed sweep reports again
        results.write_hparams(tmp_path, trials, "eval/loss")
    for trial, expected in zip(trials, ("1.5", "null"), strict=True):
        (file,) = (tmp_path / trial.folder).iterdir()
        values = [value for event in EventFileLoader(str(file)).Load() for value in event.summary.value]
        expected_tags = [metadata.EXPERIMENT_TAG, metadata.SESSION_START_INFO_TAG, "sweep/eval/loss"]
        assert [value.tag for value in values] == expected_tags
        info = metadata.parse_session_start_info_plugin_data(values[1].metadata.plugin_data.content)
        assert info.hparams["optim.clip"].string_value == expected
        assert info.group_name == trial.folder


def test_any_path_can_be_passed_on_the_command_line() -> None:
    for path in ("runs/x-1.5", "my dir/it's, a=b", "[0]"):
        assert settings(set_to("run_dir", path)).run_dir == path


def test_a_trial_with_a_nan_metric_is_ranked_last() -> None:
    values = [0.5, math.nan, 0.1, None, 0.05]
    trials = [Trial(number, (), {}, "", state=DONE, value=value) for number, value in enumerate(values)]
    ordered = sorted(trials, key=lambda trial: results.order([trial], RANDOM))
    assert [trial.number for trial in ordered] == [4, 2, 0, 1, 3]
