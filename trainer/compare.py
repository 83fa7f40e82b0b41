"""Compare the speed, communication, losses and models of finished runs.

`python -m trainer.compare RUN|SWEEP ...` reads config.yaml, result.json and metrics.jsonl of each run, and
compares each run with the first one. To find out why the losses of two runs differ, use `python -m
trainer.diff RUN RUN`.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from trainer.config.saved_run import differing_settings, saved_values
from trainer.errors import UserError
from trainer.files.columns import cell, columns
from trainer.files.untrusted import printable
from trainer.sweep.trials import DONE, RunFiles, read_trials

# Losses, or models, can only be compared if these settings are equal.
_MUST_MATCH = ["data.dataset", "data.task", "train.global_batch_size", "train.precision", "seed"]
_MUST_MATCH += ["train.max_steps", "train.epochs"]
_MS = "usage/ms_per_step/step"
_COMM = ("usage/comm/total_ms", "usage/comm/overlapped_ms", "usage/comm/exposed_ms")
_FEWEST = 5  # speeds are compared only if each run has this number of log windows
_MOST_SETTINGS = 6  # columns in the table; further settings are only named below it


def read_runs(named: Sequence[str]) -> dict[str, RunFiles]:
    """Return the given runs, and the finished runs of each given sweep, by short names."""
    folders: list[Path] = []
    for folder in map(Path, named):
        trials = read_trials(folder)
        folders += [folder / trial.folder for trial in trials if trial.state == DONE]
        folders += [] if trials else [folder]
    for folder in folders:
        if not (folder / "result.json").is_file():
            raise UserError(f"{folder} is not a finished run: it has no result.json")
    names = [folder.name or folder.absolute().name for folder in folders]
    keys = names if len(set(names)) == len(names) else folders
    runs = {printable(key): RunFiles(folder) for key, folder in zip(keys, folders, strict=True)}
    for name, run in runs.items():
        if not run.result:
            raise UserError(f"{name} cannot be compared: its result.json is damaged")
    if len(runs) < 2:
        raise UserError(
            f"a comparison needs at least two finished runs, but {' '.join(named)} has {len(runs)}"
        )
    return runs


def compare(runs: Mapping[str, RunFiles]) -> str:
    """Return tables of results, speed and weights, and a summary."""
    settings = {name: saved_values(run.folder) for name, run in runs.items()}
    tables = {
        "Results": _results(runs, settings),
        "Speed": [_SPEED, *(_speed(name, run) for name, run in runs.items())],
        "Weights": _weights(runs),
    }
    blocks = [f"{title}\n{columns(rows)}" for title, rows in tables.items()]
    more = differing_settings(list(settings.values()))[_MOST_SETTINGS:]
    notes = [f"settings that also differ: {', '.join(more)}"] if more else []
    notes += [*_comparability_warnings(settings), *_summary(runs, settings)]
    return "\n\n".join([*blocks, "\n".join(notes)])


def _comparability_warnings(settings: Mapping[str, Mapping[str, str]]) -> list[str]:
    (first, base), *others = settings.items()
    lines = []
    for name, values in others:
        found = [
            f"{key} ({base.get(key, 'none')} and {values.get(key, 'none')})"
            for key in differing_settings([base, values])
            if any(f"{key}.".startswith(f"{prefix}.") for prefix in _MUST_MATCH)
        ]
        if found:
            lines.append(f"not comparable: {first} and {name} differ in {printable(', '.join(found))}")
    return lines


def _results(runs: Mapping[str, RunFiles], settings: Mapping[str, Mapping[str, str]]) -> list[list[str]]:
    names = differing_settings(list(settings.values()))
    found = dict.fromkeys(name for run in runs.values() for name in run.result)
    metrics = ["train/loss", *(name for name in found if name.startswith("eval/"))]
    losses = {
        name: {step: loss for step, loss in run.scalars.get("eval/loss", {}).items() if math.isfinite(loss)}
        for name, run in runs.items()
    }
    best = {name: min(values.values(), default=None) for name, values in losses.items()}
    reached = [value for value in best.values() if value is not None]
    level = max(reached) if len(reached) == len(runs) else None  # the loss that all runs have reached
    header = ["run", *names[:_MOST_SETTINGS], "steps", *metrics, "best eval/loss"]
    rows = [header] if level is None else [[*header, f"s to eval/loss {level:.4g}"]]
    for name, run in runs.items():
        row = [name, *(settings[name].get(key, "") for key in names[:_MOST_SETTINGS])]
        row += [cell(run.metrics.get(key), ".5g") for key in ("steps", *metrics)]
        row.append(cell(best[name], ".5g"))
        if level is not None:
            step = min(step for step, loss in losses[name].items() if loss <= level)
            row.append(cell(step * run.metrics.get("ms_per_step", math.nan) / 1e3, ".3g"))
        rows.append(row)
    return rows


_SPEED = ["run", "strategy", "comm", "processes", "ms/step", "spread", "samples/s", "peak MiB"]
_SPEED += ["comm ms", "overlapped", "exposed"]


def _speed(name: str, run: RunFiles) -> list[str]:
    """Return the row of `run` in the Speed table; the spread is empty if the run has few log lines."""
    numbers = run.metrics
    row = [name, *(str(run.result.get(fact, "")) for fact in ("strategy", "comm", "world_size"))]
    times = _ms_per_step(run)
    median, first, third = _quartiles(times) if times else (None, 0.0, 0.0)
    row += [cell(median, ".2f"), cell((third - first) / 2, ".2f") if len(times) >= _FEWEST else ""]
    row.append(cell(numbers.get("samples_per_second"), ".0f"))
    row.append(cell(numbers.get("peak_memory_bytes", math.nan) / 2**20, ".0f"))
    for part in _COMM:
        values = run.scalars.get(part, {}).values()
        row.append(cell(statistics.median(values) if values else None, ".2f"))
    return row


def _weights(runs: Mapping[str, RunFiles]) -> list[list[str]]:
    """Return a row per run: the hash of its weights, and where its losses differ from the first run's."""
    rows = [["run", "param_sha256", "first difference", "largest difference of train/loss"]]
    base, *_ = runs.values()
    for name, run in runs.items():
        mine, theirs = run.scalars.get("train/loss", {}), base.scalars.get("train/loss", {})
        # After a resume between two log steps, a mean is over fewer steps, so it can't be compared.
        partial = {step for each in (run, base) for step in each.scalars.get("train/loss_steps", {})}
        # A loss is a mean since the previous log step, which must be equal too.
        intervals = pairwise([0, *mine]), pairwise([0, *theirs])
        common = sorted({step for _, step in set(intervals[0]) & set(intervals[1])} - partial)
        gaps = {step: gap for step in common if not math.isnan(gap := abs(mine[step] - theirs[step]))}
        found = ["", ""]
        if run is not base and gaps:
            first = next((f"step {step}" for step, gap in gaps.items() if gap), "none")
            found = [first, f"{max(gaps.values()):.2g}"]
        rows.append([name, str(run.result.get("param_sha256", ""))[:12], *found])
    return rows


def _summary(runs: Mapping[str, RunFiles], settings: Mapping[str, Mapping[str, str]]) -> list[str]:
    lines = []
    losses = sorted(
        (loss, name)
        for name, run in runs.items()
        if math.isfinite(loss := run.metrics.get("eval/loss", math.nan))
    )
    if len(losses) > 1 and cell(losses[0][0], ".5g") != cell(losses[1][0], ".5g"):
        lines.append(f"lowest eval/loss: {losses[0][1]}, {losses[0][0]:.5g}")
    windows = {name: times for name, run in runs.items() if (times := _ms_per_step(run))}
    few = [name for name, times in windows.items() if len(times) < _FEWEST]
    timed = sorted(  # by ms per sample, because runs may differ in the batch size
        ([ms / int(settings[name]["train.global_batch_size"]) for ms in _quartiles(times)], name)
        for name, times in windows.items()
    )
    if len(timed) > 1 and few:
        lines.append(
            f"speed: not compared, because fewer than {_FEWEST} log windows follow the first one in "
            f"{', '.join(few)}; train longer, or lower train.log_every_steps"
        )
    elif len(timed) > 1:
        (fast, fastest), (slow, following) = timed[:2]
        least, ratio, most = slow[1] / fast[2], slow[0] / fast[0], slow[2] / fast[1]
        words = f"{ratio:.2f} times ({least:.2f} to {most:.2f}) as fast as {following}"
        lines.append(
            f"fastest: {fastest}, {words}"
            if least > 1
            else f"speed: no clear difference: {fastest} is {words}"
        )
    first, *_ = hashes = {name: run.result.get("param_sha256") for name, run in runs.items()}
    same = [name for name in hashes if hashes[first] and hashes[name] == hashes[first]]
    equal = ", ".join(same[1:]) if len(same) > 1 else "none"
    return [*lines, f"weights identical to those of {first}: {equal}"]


def _ms_per_step(run: RunFiles) -> list[float]:
    """Return the ms per step for each log line except the first (warm-up), unless there is only one."""
    windows = [ms for ms in run.scalars.get(_MS, {}).values() if ms > 0]
    return windows[1:] or windows or [run.metrics[name] for name in run.metrics if name == "ms_per_step"]


def _quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    if len(times) == 1:
        return times[0], times[0], times[0]
    first, median, third = statistics.quantiles(times, n=4, method="inclusive")
    return median, first, third


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    folders = "a run directory, or the folder of a sweep"
    parser.add_argument("runs", nargs="+", metavar="RUN|SWEEP", help=folders)
    try:
        print(compare(read_runs(parser.parse_args(arguments).runs)))
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
