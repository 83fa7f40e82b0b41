"""The loggers of a run: several at once, a user's own, W&B; and the layout of TensorBoard."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.ranks import run_ranks
from tests.runs import context_of, train
from trainer.errors import RetryableError, UserError
from trainer.failures import exit_report
from trainer.failures.diagnosis import Failure
from trainer.loggers.base import Logger
from trainer.loggers.tensorboard import TensorBoard
from trainer.loggers.wandb import Wandb
from trainer.run_dir.metrics_file import read_metrics

SHORT = ("train.max_steps=8", "train.log_every_steps=2", "model.hidden=[16]", "checkpoint.every_epochs=null")
NOTED = ("+logger.noted._target_=tests.user_parts.Noted", "+logger.noted.word=hear")


@pytest.mark.slow
def test_every_logger_gets_the_same_calls(tmp_path: Path) -> None:
    run_ranks(train, 2, *SHORT, *NOTED, f"run_dir={tmp_path}", init=False)
    calls: list[list[Any]] = [json.loads(line) for line in (tmp_path / "noted.jsonl").open()]
    assert calls[0] == ["begin", "hear", ["first_step", "run_id", "settings"]], "once: on rank 0"
    assert calls[-1] == ["close"]
    logged: dict[str, dict[int, float]] = {}
    for _, values, step in (call for call in calls if call[0] == "scalars"):
        for name, value in values.items():
            logged.setdefault(name, {})[step] = value
    written = read_metrics(tmp_path)
    assert written.pop("weights_hash"), "not a curve"
    assert logged == written

    page = EventAccumulator(str(tmp_path)).Reload()
    shown = set(page.Tags()["scalars"])
    assert shown == {name for name, values in logged.items() if any(values.values())}, "no curve of zeros"
    assert "train/loss" in shown and "usage/comm/overlapped_ms" not in shown


def test_settings_with_a_target_are_logged_and_not_instantiated(tmp_path: Path) -> None:
    groups = "optim.groups=[{match: weight, optimizer: {_target_: torch.optim.Muon, weight_decay: 0}}]"
    with context_of(f"run_dir={tmp_path}", "logger=jsonl", "model.hidden=[]", groups, *NOTED):
        begin = json.loads((tmp_path / "noted.jsonl").read_text().splitlines()[0])
    assert begin == ["begin", "hear", ["first_step", "run_id", "settings"]]


def refused(run_dir: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as error, context_of(f"run_dir={run_dir}", "logger=jsonl", *overrides):
        pass
    return str(error.value)


class Hides(Logger):
    """Makes the checkpoints unreadable when the run has written its result."""

    def __init__(self, run_dir: Path, **facts: Any) -> None:
        self._checkpoints = run_dir / "checkpoints"

    def close(self) -> None:
        self._checkpoints.rename(self._checkpoints.with_name("away"))
        self._checkpoints.touch()


def test_a_disk_that_fails_after_the_result_does_not_fail_the_run(tmp_path: Path) -> None:
    hides = f"+logger.hides._target_={Hides.__module__}.Hides"
    run_ranks(train, 1, *SHORT, "strategy=single", hides, f"run_dir={tmp_path}", init=False)
    assert (tmp_path / "result.json").exists() and (tmp_path / "checkpoints").is_file()


@pytest.mark.slow
def test_a_logger_whose_close_fails_does_not_affect_others(tmp_path: Path) -> None:
    with pytest.raises(RetryableError, match=r"logger\.away of run_dir=.* cannot be written: no route"):
        train(*SHORT, "+logger.away._target_=tests.user_parts.Away", *NOTED, f"run_dir={tmp_path}")
    assert (tmp_path / "result.json").exists()
    assert '["close"]' in (tmp_path / "noted.jsonl").read_text()


@pytest.mark.slow
def test_an_invalid_logger_ends_every_rank(tmp_path: Path) -> None:
    one, other = run_ranks(refused, 2, tmp_path, "+logger.mine._target_=tests.user_parts.Deaf", init=False)
    assert "logger.mine: tests.user_parts.Deaf creates a Deaf that lacks the methods text" in one
    assert one == other


def test_invalid_text_is_escaped_in_every_logger(tmp_path: Path) -> None:
    """Half a surrogate pair cannot be encoded in UTF-8."""
    task = "data.task._target_=tests.user_parts.SaysNoText"
    run_ranks(train, 1, *SHORT, "strategy=single", task, f"run_dir={tmp_path}", init=False)
    exit_report.write_logs(Failure((0,), "raised", 1, "at caf\udce9.py:1", {}), tmp_path, {})
    log = (tmp_path / "train.log").read_text()
    assert r"said \ud800" in log and r"at caf\udce9.py:1" in log
    (events,) = tmp_path.glob("events.*")
    assert rb"shown \ud800" in events.read_bytes()


def test_the_tensorboard_command_shows_the_run_name() -> None:
    assert TensorBoard(Path("runs/a day/10-00-00"), 0).look == "tensorboard --logdir 'runs/a day'"
    assert TensorBoard(Path(), 0).look == f"tensorboard --logdir {Path().resolve().parent}"


def test_wandb_continues_its_run_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, calls = Mock(), list[Any]()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for first_step, mode in (0, "online"), (4, "online"), (4, "offline"):
        logger = Wandb(tmp_path, "a run", first_step, {"strategy.name": "ddp"}, mode=mode)
        calls.append(wandb.init.call_args.kwargs)
    assert [(one["id"], one["resume"]) for one in calls] == [
        ("a run", None),
        ("a run", "allow"),
        ("a run", None),
    ]
    assert (calls[0]["name"], calls[0]["config"]) == (tmp_path.name, {"strategy.name": "ddp"})
    logger.scalars({"train/loss": 0.5}, 5)
    logger.text("config", "a < b", 5)
    logger.histogram("weights", torch.ones(2), torch.arange(3), 5)
    logger.close()
    run, media = wandb.init.return_value, {"config": wandb.Html(), "weights": wandb.Histogram()}
    values = [{"train/loss": 0.5}, *({name: value} for name, value in media.items())]
    assert [one.args[0] for one in run.log.call_args_list] == [{"step": 5, **each} for each in values]
    run.finish.assert_called_once_with()


def with_logger(name: str, *overrides: str) -> None:
    train(*SHORT, f"logger={name}", *overrides)


@pytest.mark.slow
def test_mlflow_has_every_curve_and_continues_after_a_resume(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    for steps, resume in (4, "null"), (6, "auto"):
        options = (f"train.max_steps={steps}", f"resume={resume}", f"run_dir={tmp_path}")
        run_ranks(with_logger, 1, "mlflow", *options, init=False)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (experiment,) = [one for one in client.search_experiments() if one.name == "ringmaster"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["optim.lr"] == "0.1"
    curve = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "train/loss")}
    assert curve == read_metrics(tmp_path)["train/loss"]
