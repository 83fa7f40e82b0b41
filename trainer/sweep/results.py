"""The results of a sweep: a table of trials, results.csv, results.png, and TensorBoard's HParams tab."""

import contextlib
import csv
import io
import math
import shlex
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.files.columns import cell, columns
from trainer.files.writing import atomic_file
from trainer.sweep.search import SweepConfig
from trainer.sweep.trials import DONE, PRUNED, RunFiles, Trial, TrialLog, values_of

CSV, PLOT, _HPARAMS = "results.csv", "results.png", ".hparams"


def write(log: TrialLog, wanted: SweepConfig) -> str:
    """Write the result files of a sweep to its folder; return the table of its trials and the paths."""
    folder, trials = log.folder, list(log.trials.values())
    trials.sort(key=lambda trial: order([trial], wanted))
    _write_csv(folder, trials, wanted.metric)
    write_hparams(folder, trials, wanted.metric)
    drawn = draw(folder / PLOT, trials, wanted)
    files = [["table", str(folder / CSV)], *([["plots", str(folder / PLOT)]] if drawn else [])]
    files.append(["view with", f"tensorboard --logdir {shlex.quote(str(folder))}"])
    return f"\n{table(trials, wanted)}\n\n{columns(files)}"


def order(repeats: Sequence[Trial], wanted: SweepConfig) -> float:
    """Return the sort key that puts the best trial first, and trials without a finite metric last."""
    if not (values := values_of(repeats)) or any(trial.state == PRUNED for trial in repeats):
        return math.inf
    return statistics.fmean(values) * (1 if wanted.mode == "min" else -1)


def table(trials: Sequence[Trial], wanted: SweepConfig) -> str:
    """Return a table of the trials, best first; with several seeds, one row for each combination."""
    if wanted.seeds == 1:
        keys = _swept_keys(trials)
        cells = [[t.folder, *_cells(t, keys), cell(t.value), state(t)] for t in trials]
        return columns([["trial", *keys, wanted.metric, "state"], *cells])
    keys = [key for key in _swept_keys(trials) if key != "seed"]
    groups: dict[tuple[str, ...], list[Trial]] = {}
    for trial in trials:
        groups.setdefault(tuple(_cells(trial, keys)), []).append(trial)
    rows = [[*keys, f"{wanted.metric}, mean", "deviation", "seeds done"]]
    for group, repeats in sorted(groups.items(), key=lambda item: order(item[1], wanted)):
        values = values_of(repeats)
        row = [*group, cell(statistics.fmean(values)) if values else ""]
        row += [cell(statistics.stdev(values)) if len(values) > 1 else ""]
        others = Counter(trial.state for trial in repeats if trial.state != DONE)
        words = [f"{len(values)} of {len(repeats)}", *(f"{count} {name}" for name, count in others.items())]
        rows.append([*row, ", ".join(words)])
    return columns(rows)


def state(trial: Trial) -> str:
    """Return the state of a trial; for a pruned trial, the state and the step."""
    return trial.state + (f" at step {trial.pruned_at}" if trial.state == PRUNED else "")


def _write_csv(folder: Path, trials: Sequence[Trial], metric: str) -> None:
    rows = []
    for trial in trials:
        row: dict[str, Any] = {"trial": trial.number, "folder": trial.folder, "state": trial.state}
        row |= {"status": trial.status, "reason": trial.reason, "pruned_at": trial.pruned_at, **trial.swept}
        row |= {"metric": metric, "value": trial.value, "seconds": trial.seconds}
        result = RunFiles(folder / trial.folder).result.items()
        rows.append(row | {k: v for k, v in result if k not in row and not isinstance(v, dict)})
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows(rows)
    with atomic_file(folder / CSV) as file:
        file.write(text.getvalue().encode(errors="replace"))


def write_hparams(folder: Path, trials: Sequence[Trial], metric: str) -> None:
    """Write the settings of every started trial to its folder, for TensorBoard's HParams tab."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import summary_v2 as api
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    settings = {key: _column(trials, key) for key in _swept_keys(trials)}
    # Under a separate tag: a run may end before its first log step, and not all its metrics are scalars.
    tag = f"sweep/{metric}"
    described = api.hparams_config_pb(
        hparams=[api.HParam(key) for key in settings], metrics=[api.Metric(tag, display_name=metric)]
    )
    for index, trial in enumerate(trials):
        events = folder / trial.folder
        if not events.is_dir():
            continue
        for old in events.glob(f"*{_HPARAMS}"):
            with contextlib.suppress(OSError):  # the tab then also shows an old metric
                old.unlink()
        values = {key: column[index] for key, column in settings.items() if index in column}
        summaries = [described, api.hparams_pb(values, trial_id=trial.folder)]
        if trial.value is not None:
            summaries.append(Summary(value=[Summary.Value(tag=tag, simple_value=trial.value)]))
        writer = EventFileWriter(str(events), filename_suffix=_HPARAMS)
        for summary in summaries:
            writer.add_event(Event(summary=summary))
        writer.close()


def draw(path: Path, trials: Sequence[Trial], wanted: SweepConfig) -> bool:
    """Plot the metric against each swept setting; return False if there are no settings or values to compare.

    Pruned trials are crosses at their last value, clipped to the range of the trials that are done.
    """
    import matplotlib

    done = [trial for trial in trials if values_of([trial])]
    keys = [key for key in _swept_keys(done) if len({*_column(done, key).values()}) > 1]
    if len(done) < 2 or not keys:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    values = values_of(done)
    best = min(range(len(done)), key=lambda index: order([done[index]], wanted))
    pruned = [trial for trial in trials if trial.state == PRUNED and math.isfinite(trial.value or math.nan)]
    values += [min(max(trial.value or 0, min(values)), max(values)) for trial in pruned]
    size = (max(4, 3.6 * len(keys)), 3.4)
    figure, all_axes = plt.subplots(
        1, len(keys), figsize=size, squeeze=False, sharey=True, layout="constrained"
    )
    for key, axes in zip(keys, all_axes[0], strict=True):
        places = _column([*done, *pruned], key)
        numbers = [place for place in places.values() if isinstance(place, float)]
        if numbers and min(numbers) > 0 and max(numbers) / min(numbers) >= 10:
            axes.set_xscale("log")
        for kind, marker in ((range(len(done)), "o"), (range(len(done), len(values)), "x")):
            shown = [index for index in kind if index in places]
            axes.scatter(
                [places[index] for index in shown], [values[index] for index in shown], s=24, marker=marker
            )
        if best in places:
            axes.scatter(places[best], values[best], s=60, facecolors="none", edgecolors="black")
        axes.set_xlabel(key)
        axes.grid(alpha=0.3)
    all_axes[0][0].set_ylabel(wanted.metric)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def _swept_keys(trials: Sequence[Trial]) -> list[str]:
    return list(dict.fromkeys(key for trial in trials for key in trial.swept))


def _cells(trial: Trial, keys: Sequence[str]) -> list[str]:
    return [trial.swept.get(key) or "" for key in keys]


def _column(trials: Sequence[Trial], key: str) -> dict[int, float | str]:
    """Return the values of the setting `key`, by the indices of the trials that have it.

    Values are numbers if all are finite numbers, otherwise strings: the HParams tab hides mixed types.
    """
    given = ((index, trial.swept.get(key)) for index, trial in enumerate(trials))
    texts = {index: text for index, text in given if text is not None}
    try:
        numbers = {index: float(text) for index, text in texts.items()}
    except ValueError:
        return {**texts}
    return {**(numbers if all(map(math.isfinite, numbers.values())) else texts)}
