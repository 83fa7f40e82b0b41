"""The results of a sweep: a table by its metric, results.csv, results.png, and TensorBoard's HParams tab."""

import contextlib
import csv
import io
import math
import shlex
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.files.atomic_file import atomic_file
from trainer.files.untrusted import printable
from trainer.sweep.runs import Run, columns, shown
from trainer.sweep.settings import SweepConfig
from trainer.sweep.trials import DONE, Trial, TrialLog, values_of

CSV, PICTURE, _HPARAMS = "results.csv", "results.png", ".hparams"


def write(log: TrialLog, settings: SweepConfig) -> None:
    """Print the table of all trials of a sweep's folder, and write the files to the folder."""
    folder, trials = log.folder, list(log.trials.values())
    if not trials:
        print("no trial was started")
        return
    trials.sort(key=lambda trial: order([trial], settings))
    print(f"\n{table(trials, settings)}\n")
    done = [trial for trial in trials if trial.state == DONE]
    if done and all(trial.value is None for trial in done):
        metrics = ", ".join(map(printable, Run(folder / done[0].folder).metrics))
        print(f"hydra.sweeper.metric is {settings.metric}, but trials have {metrics}\n")
    _write_csv(folder, trials, settings.metric)
    write_hparams(folder, trials, settings.metric)
    drawn = draw(folder / PICTURE, trials, settings)
    look = f"tensorboard --logdir {shlex.quote(str(folder))}"
    print(f"{folder / CSV}" + (f"  {folder / PICTURE}" if drawn else "") + f"  {look}")


def order(repeats: Sequence[Trial], settings: SweepConfig) -> tuple[int, float, int]:
    """The best first, then those without a number."""
    value = statistics.fmean(values) if (values := values_of(repeats)) else math.nan
    return (1, 0.0, repeats[0].number) if math.isnan(value) else (0, settings.sign * value, repeats[0].number)


def table(trials: Sequence[Trial], settings: SweepConfig) -> str:
    """The trials, best first; with several seeds, one row for all of them, with their deviation."""
    keys = _swept_keys(trials)
    groups: dict[tuple[str, ...], list[Trial]] = {}
    for trial in trials:
        cells = [trial.swept.get(key, "") for key in keys]
        groups.setdefault((*([trial.folder] if settings.seeds == 1 else []), *cells), []).append(trial)
    rows = [["trial", *keys, settings.metric, "state"]]
    if settings.seeds > 1:
        rows = [[*keys, f"{settings.metric}, mean", "deviation", "seeds done"]]
    for group, repeats in sorted(groups.items(), key=lambda item: order(item[1], settings)):
        values = values_of(repeats)
        row = [*group, shown(statistics.fmean(values)) if values else ""]
        if settings.seeds > 1:
            row += [shown(statistics.stdev(values)) if len(values) > 1 else ""]
            rows.append([*row, f"{len(values)} of {len(repeats)}"])
        else:
            rows.append([*row, repeats[0].state])
    return columns(rows)


def _write_csv(folder: Path, trials: Sequence[Trial], metric: str) -> None:
    """A row for each run, ended in any state; the column of the metric is `value`."""
    keys = _swept_keys(trials)
    rows = []
    for trial in trials:
        row: dict[str, Any] = {"trial": trial.number, "folder": trial.folder, "state": trial.state}
        row |= {"status": trial.status, "seed": trial.seed, **{key: trial.swept.get(key) for key in keys}}
        row |= {"metric": metric, "value": trial.value, "seconds": trial.seconds}
        result = Run(folder / trial.folder).result.items()
        rows.append(row | {k: v for k, v in result if k not in row and not isinstance(v, dict)})
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows(rows)
    with atomic_file(folder / CSV) as file:
        file.write(text.getvalue().encode(errors="replace"))


def write_hparams(folder: Path, trials: Sequence[Trial], metric: str) -> None:
    """Write the settings of every trial that has started beside its events, for TensorBoard's HParams tab.

    SummaryWriter.add_hparams would create another run for each. Files of an earlier report are replaced.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import summary_v2 as api
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    settings = {"seed": _of_one_type([str(trial.seed) for trial in trials])}
    settings |= {key: _of_one_type(_texts(trials, key)) for key in _swept_keys(trials)}
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


def draw(path: Path, trials: Sequence[Trial], settings: SweepConfig) -> bool:
    """Draw the metric over each swept setting; False if less than two trials are done, or nothing differs."""
    done = [trial for trial in trials if values_of([trial])]
    keys = [key for key in _swept_keys(done) if len(set(_texts(done, key))) > 1]
    if len(done) < 2 or not keys:
        return False
    values = values_of(done)
    best = min(range(len(done)), key=lambda index: order([done[index]], settings))
    with picture(path, len(keys), sharey=True) as all_axes:
        for key, axes in zip(keys, all_axes, strict=True):
            places = _of_one_type(texts := _texts(done, key))
            if places == texts:
                words = sorted(set(texts))
                places = [float(words.index(text)) for text in texts]
                axes.set_xticks(range(len(words)), words, rotation=20 if len(words) > 3 else 0)
            elif min(places) > 0 and max(places) / min(places) >= 10:
                axes.set_xscale("log")
            axes.scatter(places, values, s=24)
            axes.scatter(places[best], values[best], s=60, facecolors="none", edgecolors="black")
            axes.set_xlabel(key)
            axes.grid(alpha=0.3)
        all_axes[0].set_ylabel(settings.metric)
    return True


@contextlib.contextmanager
def picture(path: Path, num_axes: int, *, sharey: bool = False) -> Iterator[list[Any]]:
    """Yields axes side by side, to be drawn in, and then saves the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    size = (max(4, 3.6 * num_axes), 3.4)
    figure, axes = plt.subplots(1, num_axes, figsize=size, squeeze=False, sharey=sharey, layout="constrained")
    try:
        yield list(axes[0])
        figure.savefig(path, dpi=110)
    finally:
        plt.close(figure)


def _swept_keys(trials: Sequence[Trial]) -> list[str]:
    """The settings that were swept, in the order of the command line."""
    return list(dict.fromkeys(key for trial in trials for key in trial.swept))


def _texts(trials: Sequence[Trial], key: str) -> list[str]:
    return [trial.swept.get(key, "null") for trial in trials]


def _of_one_type(texts: list[str]) -> Any:
    """Numbers if all are finite ones, or else the texts: the HParams tab hides a trial of another type."""
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        return texts
    return numbers if all(map(math.isfinite, numbers)) else texts
