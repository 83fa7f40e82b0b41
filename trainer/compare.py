"""Compare the speed, communication, losses and models of finished runs.

`python -m trainer.compare RUN RUN ...`, or the folder of a sweep, reads config.yaml, result.json and
metrics.jsonl of each run, and compares it with the first.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import OmegaConf

from trainer.config.overrides import leaves
from trainer.config.saved_run import read_settings
from trainer.errors import UserError
from trainer.files.columns import cell, columns
from trainer.files.untrusted import printable
from trainer.sweep.trials import DONE, RunFiles, read_trials

# Losses, or models, can only be compared if these settings are equal.
_ALIKE = ["data.dataset", "data.task", "train.global_batch_size", "train.precision", "seed"]
_ALIKE += ["train.max_steps", "train.epochs"]
_MS, _COMM = "speed/ms_per_step/step", ("comm/total_ms", "comm/overlapped_ms", "comm/exposed_ms")
_FEWEST = 5  # log windows that a run needs for a ratio of speeds
_HEADER = ["run", "strategy", "comm", "processes", "ms/step", "spread", "samples/s", "peak MiB", "comm ms"]
_HEADER += ["overlapped", "exposed", "train/loss", "eval/loss", "param_sha256", "first difference"]
_HEADER += ["largest loss difference"]


def read_runs(named: Sequence[str]) -> dict[str, RunFiles]:
    """Return the named runs, and the finished runs of each named sweep, by short names.

    Raises:
        UserError: there are fewer than two runs, or one has not finished, or has a damaged result.json.
    """
    folders: list[Path] = []
    for folder in map(Path, named):
        trials = read_trials(folder)
        folders += [folder / trial.folder for trial in trials if trial.state == DONE]
        folders += [] if trials else [folder]
    for folder in folders:
        if not (folder / "result.json").is_file():
            raise UserError(f"{folder} is not a finished run: it has no result.json")
    short = len({folder.name for folder in folders}) == len(folders)
    runs = {printable(folder.name if short else folder): RunFiles(folder) for folder in folders}
    for name, run in runs.items():
        if not run.result:
            raise UserError(f"{name} cannot be compared: its result.json is damaged")
    if len(runs) < 2:
        raise UserError(f"{' '.join(named)}: {len(runs)} finished run, but two are needed to compare")
    return runs


def compare(runs: Mapping[str, RunFiles]) -> str:
    """Return the settings that differ, a table, and one line: the fastest run, and equal models."""
    (first, base), *others = runs.items()
    unlike = [
        f"different: {first} and {name}: {words}" for name, run in others if (words := _unlike(base, run))
    ]
    table = columns([_HEADER, *(_row(name, run, base) for name, run in runs.items())])
    return "\n".join([*unlike, *([""] if unlike else []), table, "", _summary(runs)])


def _unlike(base: RunFiles, run: RunFiles) -> str:
    """Return the settings in or below `_ALIKE` that differ, with both values."""
    mine, theirs = (dict(leaves(OmegaConf.to_container(read_settings(one.folder)))) for one in (base, run))
    keys = [key for key in {**mine, **theirs} if any(f"{key}.".startswith(f"{name}.") for name in _ALIKE)]
    unlike = (key for key in keys if mine.get(key) != theirs.get(key))
    return ", ".join(printable(f"{key} {mine.get(key)} and {theirs.get(key)}") for key in unlike)


def _row(name: str, run: RunFiles, base: RunFiles) -> list[str]:
    numbers = run.metrics
    row = [name, *(str(run.result.get(fact, "")) for fact in ("strategy", "comm", "world_size"))]
    if times := _ms_per_step(run):
        median, first, third = _quartiles(times)
        row += [f"{median:.2f}", f"± {(third - first) / 2:.2f}"]
    else:
        row += ["", ""]
    row.append(cell(numbers.get("samples_per_second"), ".0f"))
    row.append(cell(numbers["peak_memory_bytes"] / 2**20, ".0f") if "peak_memory_bytes" in numbers else "")
    for part in _COMM:
        values = run.scalars.get(part, {}).values()
        row.append(cell(statistics.median(values) if values else None, ".2f"))
    row += [cell(numbers.get("train/loss"), ".5g"), cell(numbers.get("eval/loss"), ".5g")]
    row.append(str(run.result.get("param_sha256", ""))[:12])
    mine, theirs = run.scalars.get("train/loss", {}), base.scalars.get("train/loss", {})
    # Means over fewer steps, because a run was resumed after the last log step, can't be compared.
    partial = {step for each in (run, base) for step in each.scalars.get("train/loss_steps", {})}
    common = sorted((mine.keys() & theirs.keys()) - partial)
    gaps = {step: gap for step in common if not math.isnan(gap := abs(mine[step] - theirs[step]))}
    if run is base or not gaps:
        return [*row, "", ""]
    difference = next((f"step {step}" for step, gap in gaps.items() if gap), "none")
    return [*row, difference, f"{max(gaps.values()):.2g}"]


def _summary(runs: Mapping[str, RunFiles]) -> str:
    """Return which run is fastest and whether by more than the spread, and which models are equal."""
    words = []
    windows = {name: times for name, run in runs.items() if (times := _ms_per_step(run))}
    few = [name for name, times in windows.items() if len(times) < _FEWEST]
    timed = sorted((_quartiles(times), name) for name, times in windows.items())
    if len(timed) > 1 and few:
        words = [
            f"no comparison of speed, because fewer than {_FEWEST} log windows follow the first one in "
            f"{', '.join(few)}; train longer, or lower train.log_every_steps"
        ]
    elif len(timed) > 1:
        (fast, fastest), (slow, next_one) = timed[:2]
        least, ratio, most = slow[1] / fast[2], slow[0] / fast[0], slow[2] / fast[1]
        words = [
            f"{fastest} is fastest, {ratio:.2f} x ({least:.2f} to {most:.2f}) as fast as the next, {next_one}"
        ]
        if least <= 1:
            words[0] += " (within their spread: no difference shown)"
    evaluated = {name: run.metrics.get("eval/loss", math.nan) for name, run in runs.items()}
    losses = sorted((loss, name) for name, loss in evaluated.items() if math.isfinite(loss))
    if len(losses) > 1 and cell(losses[0][0], ".5g") != cell(losses[1][0], ".5g"):
        words.append(f"{losses[0][1]} has the lowest eval/loss, {losses[0][0]:.5g}")
    first, *_ = hashes = {name: run.result.get("param_sha256") for name, run in runs.items()}
    same = [name for name in hashes if hashes[first] and hashes[name] == hashes[first]]
    if len(same) > 1:
        words.append(f"equal to the last bit: the models of {', '.join(same)}")
    else:
        words.append(f"no other model equals that of {first} to the last bit")
    return "; ".join(words)


def _ms_per_step(run: RunFiles) -> list[float]:
    """Return the ms per step of each log window, without the first (warm-up) unless it is the only one."""
    windows = [ms for ms in run.scalars.get(_MS, {}).values() if ms > 0]
    return windows[1:] or windows or [run.metrics[name] for name in run.metrics if name == "ms_per_step"]


def _quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the first quartile and the third quartile."""
    if len(times) == 1:
        return times[0], times[0], times[0]
    first, median, third = statistics.quantiles(times, n=4, method="inclusive")
    return median, first, third


def main(arguments: Sequence[str] | None = None) -> int:
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m trainer.compare", description=about)
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
