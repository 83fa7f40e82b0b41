"""Evaluate, predict and sample: the run's own metrics, each sample once, the same text with a cache."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.programs import finish, finish_ranks
from tests.ranks import run_ranks
from tests.runs import settings, train
from trainer import evaluate, predict
from trainer.config import to_yaml
from trainer.config.saved_run import saved_settings
from trainer.distributed.process_group import process_group
from trainer.errors import UserError
from trainer.files.writing import output_file
from trainer.inference.command import arguments, start

STRIPES = [
    "logger=jsonl",
    "data.dataset={_target_: tests.user_parts.Stripes}",
    "+data.dataset.num_samples=125",
    "model._target_=tests.user_parts.Normed",
    "~model.input_shape",
    "~model.num_classes",
    "~model.hidden",
    "train.global_batch_size=16",
    "train.epochs=1",
    "checkpoint.every_steps=3",
    "checkpoint.keep_last=9",
    "ema.decay=0.9",
    "distributed.device=cpu",
]
TEXT = [
    "logger=jsonl",
    "experiment=text_gpt",
    "data.dataset.block_size=32",
    "model.width=32",
    "model.depth=2",
    "train.global_batch_size=8",
    "train.max_steps=20",
    "schedule.warmup_steps=2",
    "train.eval_every_epochs=0",
    "distributed.device=cpu",
]
WAYS = {"ddp": 2, "fsdp": 2}


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def trained_and_evaluated(run_dir: str, strategy: str) -> tuple[dict[str, Any], dict[str, Any] | None, bool]:
    """Return the metrics of the run and its evaluation, and whether its directory is otherwise unchanged."""
    run = Path(run_dir)
    result = train(*STRIPES, f"strategy={strategy}", f"run_dir={run}")
    before = _contents(run)
    evaluation = evaluate.evaluate(saved_settings(run))
    predict.predict(saved_settings(run), run.with_suffix(".csv"))
    after = _contents(run)
    after.pop("evaluation.json", None)
    return result, evaluation, after == before


def _contents(run_dir: Path) -> dict[str, tuple[int, int]]:
    found = {str(path.relative_to(run_dir)): path.stat() for path in run_dir.rglob("*") if path.is_file()}
    return {name: (stat.st_mtime_ns, stat.st_size) for name, stat in found.items()}


def evaluated_alone(folder: str) -> dict[str, dict[str, float]]:
    runs = [(name, Path(folder, name)) for name in WAYS]
    alone = ["strategy=single"]
    return {name: evaluate.evaluate(saved_settings(run, alone)) or {} for name, run in runs}


@pytest.mark.slow
def test_metrics_equal_those_of_the_run(tmp_path: Path) -> None:
    results = {}
    for strategy, world_size in WAYS.items():
        run = tmp_path / strategy
        (result, evaluation, unchanged), *_ = run_ranks(
            trained_and_evaluated, world_size, str(run), strategy, init=False
        )
        assert evaluation is not None and unchanged
        assert evaluation == json.loads((run / "evaluation.json").read_text())
        assert {name: evaluation[name] for name in result if name.startswith("eval/")} == {
            name: value for name, value in result.items() if name.startswith("eval/")
        }
        assert (evaluation["step"], evaluation["world_size"]) == (result["steps"], world_size)
        rows = rows_of(tmp_path / f"{strategy}.csv")
        assert [int(row["index"]) for row in rows] == list(range(125))
        assert [int(row["label"]) for row in rows] == [k % 2 for k in range(125)]
        right = sum(row["prediction"] == row["label"] for row in rows)
        assert right / len(rows) == result["eval/accuracy"]
        assert all(
            float(row["probabilities_0"]) + float(row["probabilities_1"]) == pytest.approx(1) for row in rows
        )
        results[strategy] = result
    alone = run_ranks(evaluated_alone, 1, str(tmp_path), init=False)[0]
    for strategy, result in results.items():
        assert alone[strategy]["eval/loss"] == pytest.approx(result["eval/loss"], rel=1e-6)
        assert alone[strategy]["eval/accuracy"] == result["eval/accuracy"]


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained on a text of multi-byte characters."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text").write_text("Öl für Åse: 5 € – ja, 𝄞! " * 400)
    options = [*TEXT, f"data.dataset.path={folder}/text", f"run_dir={folder}/run"]
    run_ranks(train, 1, *options, init=False)
    return folder / "run"


@pytest.mark.slow
def test_the_same_text_with_and_without_cache_and_sharded(text_run: Path) -> None:
    ask = ["-m", "trainer.sample", str(text_run), "--prompt", "Öl für €", "--tokens", "90", "--seed", "3"]
    with_cache = finish(*ask)
    assert with_cache.code == 0, with_cache.stderr
    assert (
        with_cache.stdout.startswith("Öl für €") and "90 tokens with a key-value cache" in with_cache.stderr
    )
    without = finish(*ask, "--no-cache")
    assert without.stdout == with_cache.stdout and "90 tokens without a key-value" in without.stderr
    sharded, other = finish_ranks(2, *ask, "strategy=fsdp")
    assert sharded.stdout == with_cache.stdout, sharded.stderr
    assert other.output == ""


@pytest.mark.slow
def test_commands_start_processes(text_run: Path) -> None:
    launch = ("launch=local", "launch.processes=2")
    ended = finish("-m", "trainer.evaluate", str(text_run), *launch, "strategy=fsdp", forks=True)
    assert ended.code == 0, ended.stderr
    assert json.loads(ended.stdout)["world_size"] == 2


def refusals(text_run: str, folder: str) -> dict[str, str]:
    """Return the message for each mistake that is found only with the model."""
    run, empty = saved_settings(Path(text_run)), Path(folder, "empty")
    other = saved_settings(Path(text_run), ["model.width=64", "distributed.device=cpu"])
    made: dict[str, Callable[[], object]] = {
        "no checkpoint": lambda: evaluate.evaluate(saved_settings(empty)),
        "no best": lambda: evaluate.evaluate(run, "best"),
        "not there": lambda: evaluate.evaluate(run, "step_00000007"),
        "another model": lambda: evaluate.evaluate(other),
        "taken": lambda: predict.predict(run, empty / "config.yaml"),
        "no kind": lambda: predict.predict(run, Path(folder, "a.txt")),
    }
    said = {}
    for name, action in made.items():
        with pytest.raises(UserError) as error:
            action()
        said[name] = str(error.value)
    return said


@pytest.mark.slow
def test_missing_inputs_are_named(text_run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    shutil.copy(text_run / "config.yaml", tmp_path / "empty")
    said = run_ranks(refusals, 1, str(text_run), str(tmp_path), init=False)[0]
    assert f"{tmp_path}/empty has no checkpoint" in said["no checkpoint"]
    assert "its checkpoint.keep_best is null" in said["no best"]
    assert "step_00000007 is not a directory; use newest, best" in said["not there"]
    assert "from a different model" in said["another model"]
    assert "[256, 32] float32 saved" in said["another model"]
    assert "already exists" in said["taken"]
    assert "must end in .csv, .jsonl or .pt" in said["no kind"]


@pytest.mark.slow
def test_runs_that_cannot_generate_text_are_named(text_run: Path, tmp_path: Path) -> None:
    too_long = finish("-m", "trainer.sample", str(text_run), "--prompt", "x" * 33)
    assert too_long.code == 2
    assert "--prompt has 33 tokens, but must have 1 to 32, the model's block_size" in too_long.stderr
    run_ranks(
        train, 1, *STRIPES, "strategy=single", "train.max_steps=1", f"run_dir={tmp_path}/run", init=False
    )
    no_text = finish("-m", "trainer.sample", f"{tmp_path}/run")
    assert no_text.code == 2 and "cannot generate text: use" in no_text.stderr


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.lr=1", "optim.lr=1 has no effect after training"),
        ("strategy=fspd", "did you mean strategy=fsdp"),
    ],
)
def test_overrides_without_effect_are_named(override: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(settings(*STRIPES)))
    with pytest.raises(UserError, match=words):
        saved_settings(tmp_path, [override])


def signalled(folder: str) -> tuple[int, list[str]]:
    """Return the exit status and the remaining files."""

    def do(options: Any, config: Any) -> None:
        with process_group(config.distributed), output_file(Path(folder, "a.csv")):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    Path(folder, "config.yaml").write_text(to_yaml(settings(*STRIPES)))
    sys.argv = ["trainer.predict", folder]
    with pytest.raises(SystemExit) as ended:
        start("trainer.predict", arguments("trainer.predict", None), do)
    left = sorted(path.name for path in Path(folder).iterdir())
    return int(str(ended.value.code)), left


@pytest.mark.slow
def test_a_signal_leaves_no_partial_file(tmp_path: Path) -> None:
    assert run_ranks(signalled, 1, str(tmp_path), init=False) == [(143, ["config.yaml"])]


def test_settings_equal_the_runs_except_for_where_it_runs(tmp_path: Path) -> None:
    was = settings(*STRIPES, "strategy=ddp", "comm=ring", "launch=local", "launch.processes=4", "seed=5")
    was.distributed.rank, was.model["init_from"] = 1, "gone.pt"
    (tmp_path / "config.yaml").write_text(to_yaml(was))
    now = saved_settings(tmp_path, ["strategy=fsdp", "data.dataset.num_samples=99", "train.precision=bf16"])
    assert (now.strategy.name, now.comm.algorithm, now.launch.name) == ("fsdp", "native", "external")
    assert (now.distributed.rank, now.model["init_from"], now.seed) == (None, "gone.pt", 5)
    assert (now.data.dataset["num_samples"], now.train.precision) == (99, "bf16")
    assert now.model["_target_"] == "tests.user_parts.Normed" and now.run_dir == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("manifest.json", "is a checkpoint: pass its run"),
        ("trials.jsonl", "is a sweep: pass one"),
        ("a", "is not a run"),
    ],
)
def test_a_folder_that_is_not_a_run_is_refused(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=words):
        saved_settings(tmp_path)
