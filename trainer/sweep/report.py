"""The results of a sweep: a table by its metric, results.csv, results.png, and TensorBoard's HParams tab."""

import contextlib
import csv
import io
import math
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from trainer.files.atomic_file import atomic_file
from trainer.files.untrusted import printable
from trainer.sweep.settings import SweepConfig
from trainer.sweep.trials import DONE, Trial, TrialLog, metrics_of, result_of, swept_keys

CSV, PICTURE, _HPARAMS = "results.csv", "results.png", ".hparams"


def write(log: TrialLog, settings: SweepConfig) -> None:
    """Print the table of all trials of a sweep's folder, and write the files to the folder."""
    folder, trials = log.folder, list(log.trials.values())
    if not trials:
        print("no trial was started")
        return
    trials.sort(key=lambda trial: order(trial, settings))
    print(f"\n{table(trials, settings)}\n")
    done = [trial for trial in trials if trial.state == DONE]
    if done and all(trial.value is None for trial in done):
        metrics = ", ".join(map(printable, metrics_of(folder / done[0].folder)))
        print(f"hydra.sweeper.metric is {settings.metric}, but trials have {metrics}\n")
    _write_csv(folder, trials, settings.metric)
    write_hparams(folder, trials, settings.metric)
    drawn = draw(folder / PICTURE, trials, settings)
    look = f"tensorboard --logdir {shlex.quote(str(folder))}"
    print(f"{folder / CSV}" + (f"  {folder / PICTURE}" if drawn else "") + f"  {look}")


def order(trial: Trial, settings: SweepConfig) -> tuple[int, float, int]:
    """The best first, then those without a number."""
    if trial.state == DONE and trial.value is not None and not math.isnan(trial.value):
        return 0, settings.sign * trial.value, trial.number
    return 1, 0.0, trial.number


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
        found = [one.value for one in repeats if one.state == DONE and one.value is not None]
        mean = statistics.fmean(found) if found else None
        deviation = _number(statistics.stdev(found)) if len(found) > 1 else ""
        rank = settings.sign * mean if mean is not None else math.inf
        means.append((rank, [*values, _number(mean), deviation, f"{len(found)} of {len(repeats)}"]))
    ranked = [row for _, row in sorted(means, key=lambda one: one[0])]
    return columns([[*keys, f"{settings.metric}, mean", "deviation", "seeds done"], *ranked])


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, each column as wide as its widest cell."""
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in shown)
    return "\n".join("  ".join(cells).rstrip() for cells in lines)


def _write_csv(folder: Path, trials: Sequence[Trial], metric: str) -> None:
    """A row for each run, ended in any state; the column of the metric is `value`."""
    keys = swept_keys(trials)
    rows = []
    for trial in trials:
        row: dict[str, Any] = {"trial": trial.number, "folder": trial.folder, "state": trial.state}
        row |= {"status": trial.status, "seed": trial.seed, **{key: trial.swept.get(key) for key in keys}}
        row |= {"metric": metric, "value": trial.value, "seconds": trial.seconds}
        result = result_of(folder / trial.folder).items()
        rows.append(row | {k: v for k, v in result if k not in row and not isinstance(v, dict)})
    names = list(dict.fromkeys(name for row in rows for name in row))
    with atomic_file(folder / CSV) as file:
        text = io.TextIOWrapper(file, newline="", write_through=True)
        writer = csv.DictWriter(text, names)
        writer.writeheader()
        writer.writerows(rows)
        text.detach()


def write_hparams(folder: Path, trials: Sequence[Trial], metric: str) -> None:
    """Write the settings of every trial that has started beside its events, for TensorBoard's HParams tab.

    SummaryWriter.add_hparams would create another run for each. Files of an earlier report are replaced.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import summary_v2 as api
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    settings = {key: one_type([_typed(trial, key) for trial in trials]) for key in swept_keys(trials)}
    settings.setdefault("seed", one_type([trial.seed for trial in trials]))
    # Under a separate tag: a run may end before its first log step, and not all its metrics are scalars.
    tag = f"sweep/{metric}"
    described = api.hparams_config_pb(
        hparams=[api.HParam(key) for key in settings], metrics=[api.Metric(tag, display_name=metric)]
    )
    for index, trial in enumerate(trials):
        events = folder / trial.folder / "tensorboard"
        if not events.is_dir():
            continue
        for old in events.glob(f"*{_HPARAMS}"):
            with contextlib.suppress(OSError):  # the tab then also shows an old metric
                old.unlink()
        values = {key: column[index] for key, column in settings.items()}
        summaries = [described, api.hparams_pb(values, trial_id=trial.folder)]
        if trial.value is not None:
            summaries.append(Summary(value=[Summary.Value(tag=tag, simple_value=trial.value)]))
        writer = EventFileWriter(str(events), filename_suffix=_HPARAMS)
        for summary in summaries:
            writer.add_event(Event(summary=summary))
        writer.close()


def one_type(column: Sequence[Any]) -> list[bool | float | str]:
    """The values of one setting over the trials: all truth values, all numbers, or all strings.

    A None among numbers would hide its trial in the HParams tab.
    """
    if all(isinstance(value, bool) for value in column):
        return list(column)
    if all(type(value) in (int, float) and math.isfinite(value) for value in column):
        return [float(value) for value in column]
    return ["null" if value is None else str(value) for value in column]


def draw(path: Path, trials: Sequence[Trial], settings: SweepConfig) -> bool:
    """Draw the metric over each swept setting; False if less than two trials are done, or nothing differs."""
    done = [trial for trial in trials if trial.state == DONE and trial.value is not None]
    keys = [key for key in swept_keys(done) if len({trial.swept.get(key) for trial in done}) > 1]
    if len(done) < 2 or not keys:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    size = (max(4, 3.6 * len(keys)), 3.4)
    figure, all_axes = plt.subplots(
        1, len(keys), figsize=size, squeeze=False, sharey=True, layout="constrained"
    )
    values = [trial.value for trial in done]
    best = min(range(len(done)), key=lambda index: order(done[index], settings))
    for key, axes in zip(keys, all_axes[0], strict=True):
        column = one_type([_typed(trial, key) for trial in done])
        places = [place for place in column if isinstance(place, float)]
        if len(places) == len(done):
            if min(places) > 0 and max(places) / min(places) >= 10:
                axes.set_xscale("log")
        else:
            texts = [trial.swept.get(key, "null") for trial in done]
            words = sorted(set(texts))
            places = [float(words.index(text)) for text in texts]
            axes.set_xticks(range(len(words)), words, rotation=20 if len(words) > 3 else 0)
        axes.scatter(places, values, s=24)
        axes.scatter(places[best], values[best], s=60, facecolors="none", edgecolors="black")
        axes.set_xlabel(key)
        axes.grid(alpha=0.3)
    all_axes[0][0].set_ylabel(settings.metric)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def _typed(trial: Trial, key: str) -> Any:
    """A swept value as Hydra would read it: a number, a bool, None, a list, a string."""
    read = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={trial.swept.get(key, 'null')}"]))
    assert isinstance(read, dict)
    return read["value"]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
