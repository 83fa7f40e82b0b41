"""The results of a sweep: a table by its metric, results.csv, results.png, and TensorBoard's HParams tab."""

import csv
import io
import math
import shlex
import statistics
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.files.atomic_file import atomic_file
from trainer.files.untrusted import load_json, printable
from trainer.run_dir.metrics_file import read_metrics
from trainer.sweep import trial_log
from trainer.sweep.settings import SweepConfig
from trainer.sweep.trial_log import Trial, read_trials
from trainer.sweep.values import swept_keys

CSV, PICTURE = "results.csv", "results.png"


def write(folder: Path, settings: SweepConfig, by_log: Container[str] = frozenset()) -> None:
    """Print the table of all trials in the trial log of `folder`, and write the files to the folder.

    `by_log` are the settings that were searched on a log scale.
    """
    trials = read_trials(folder)
    for trial in trials:  # the metric may have been changed since
        trial.value = value_of(folder / trial.folder, settings.metric)
    if not trials:
        print("no trial was started")
        return
    trials.sort(key=lambda trial: _order(trial, settings))
    print(f"\n{table(trials, settings)}\n")
    done = [trial for trial in trials if trial.state == trial_log.DONE]
    if done and all(trial.value is None for trial in done):
        metrics = ", ".join(metrics_of(folder / done[0].folder))
        print(f"hydra.sweeper.metric is {settings.metric}, but trials have {metrics}\n")
    from trainer.sweep import hparams, picture  # they load tensorboard and matplotlib

    _write_csv(folder, trials, settings.metric)
    hparams.write(folder, trials, settings.metric)
    drawn = picture.draw(folder / PICTURE, trials, settings, by_log)
    look = f"tensorboard --logdir {shlex.quote(str(folder))}"
    print(f"{folder / CSV}" + (f"  {folder / PICTURE}" if drawn else "") + f"  {look}")


def table(trials: Sequence[Trial], settings: SweepConfig) -> str:
    """The trials, best first; with several seeds, one row for all of them, with their deviation."""
    keys = swept_keys(trials)
    if settings.seeds == 1:
        rows = [
            [trial.folder, *(trial.swept.get(key, "") for key in keys), _number(trial.value), trial.state]
            for trial in trials
        ]
        return columns([["trial", *keys, settings.metric, "state"], *rows])
    groups: dict[tuple[str, ...], list[Trial]] = {}
    for trial in trials:
        groups.setdefault(tuple(trial.swept.get(key, "") for key in keys), []).append(trial)
    means: list[tuple[float, list[str]]] = []
    for values, repeats in groups.items():
        found = [one.value for one in repeats if one.state == trial_log.DONE and one.value is not None]
        mean = statistics.fmean(found) if found else None
        deviation = _number(statistics.stdev(found)) if len(found) > 1 else ""
        order = settings.sign * mean if mean is not None else float("inf")
        means.append((order, [*values, _number(mean), deviation, f"{len(found)} of {len(repeats)}"]))
    ranked = [row for _, row in sorted(means, key=lambda one: one[0])]
    return columns([[*keys, f"{settings.metric}, mean", "deviation", "seeds done"], *ranked])


def value_of(run_dir: Path, metric: str) -> float | None:
    """The metric of a run: from result.json, or the last value in metrics.jsonl."""
    value = _result(run_dir).get(metric)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    values = read_metrics(run_dir).get(metric, {})
    return values[max(values)] if values else None


def metrics_of(run_dir: Path) -> list[str]:
    """The metrics of a run, for messages."""
    numbers = [name for name, value in _result(run_dir).items() if isinstance(value, int | float)]
    return list(map(printable, dict.fromkeys([*numbers, *read_metrics(run_dir)])))


def _order(trial: Trial, settings: SweepConfig) -> tuple[int, float, int]:
    if trial.state == trial_log.DONE and trial.value is not None and not math.isnan(trial.value):
        return 0, settings.sign * trial.value, trial.number
    return 1, 0.0, trial.number


def _write_csv(folder: Path, trials: Sequence[Trial], metric: str) -> None:
    """A row for each run, ended in any state; the column of the metric is `value`."""
    keys = swept_keys(trials)
    rows = []
    for trial in trials:
        row: dict[str, Any] = {"trial": trial.number, "folder": trial.folder, "state": trial.state}
        row |= {"status": trial.status, "seed": trial.seed, **{key: trial.swept.get(key) for key in keys}}
        row |= {"metric": metric, "value": trial.value, "seconds": trial.seconds}
        result = _result(folder / trial.folder).items()
        rows.append(row | {k: v for k, v in result if k not in row and not isinstance(v, dict)})
    names = list(dict.fromkeys(name for row in rows for name in row))
    with atomic_file(folder / CSV) as file:
        text = io.TextIOWrapper(file, newline="", write_through=True)
        writer = csv.DictWriter(text, names)
        writer.writeheader()
        writer.writerows(rows)
        text.detach()


def _result(run_dir: Path) -> Mapping[str, Any]:
    try:
        return load_json(run_dir / "result.json")
    except (OSError, UserError):
        return {}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, each column as wide as its widest cell."""
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in shown)
    return "\n".join("  ".join(cells).rstrip() for cells in lines)
