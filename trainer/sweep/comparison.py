"""Compares finished runs with the first of them: speed, losses, and bits of the models."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from trainer.errors import UserError
from trainer.files.untrusted import printable
from trainer.sweep.results import picture
from trainer.sweep.runs import Run, columns, shown
from trainer.sweep.trials import DONE, read_trials

# Settings that make losses incomparable, and settings that make a different run of the same task.
_TASK = ("data.dataset", "data.task")
_ALIKE = ("train.global_batch_size", "train.precision", "seed", "train.max_steps", "train.epochs")
# These, and what `_ALIKE` has, decide the bits of an exact run.
_DECIDE = ("model", "data", "optim", "schedule", "ema", "train.clip_grad_norm", "train.channels_last")
# Metrics of the parameters at each log step, and the relative difference that equal parameters may show:
# strategies add a gradient's norm in different orders.
_FIGURES = {"train/loss": 0.0, "train/grad_norm": 1e-5}
_MS, _COMM = "speed/ms_per_step/step", ("comm/total_ms", "comm/hidden_ms", "comm/exposed_ms")
_NEEDED = {"strategy", "comm", "param_sha256", "world_size", "samples_per_second", "ms_per_step"}
_NEEDED |= {"peak_memory_bytes"}


def read_runs(named: Sequence[str]) -> list[Run]:
    """The named runs, and the finished runs of each named sweep.

    Raises:
        UserError: there are less than two, or one is not a finished run.
    """
    folders: list[Path] = []
    for folder in map(Path, named):
        trials = read_trials(folder)
        folders += [folder / trial.folder for trial in trials if trial.state == DONE]
        folders += [] if trials else [folder]
    short = len({folder.name for folder in folders}) == len(folders)
    runs = []
    for folder in folders:
        for name in ("config.yaml", "result.json"):
            if not (folder / name).is_file():
                raise UserError(f"{folder} is not a finished run: it has no {name}")
        runs.append(run := Run(folder, folder.name if short else str(folder)))
        if missing := _NEEDED - run.result.keys():
            raise UserError(f"{folder} is not a run: its result.json has no {', '.join(sorted(missing))}")
    if len(runs) < 2:
        raise UserError(f"{' '.join(named)}: {len(runs)} finished run, but two are needed to compare")
    return runs


def compare(runs: Sequence[Run]) -> str:
    """The differences, a table, and a verdict in one line.

    Raises:
        UserError: the data or the task differs, so metrics are not comparable.
    """
    base, alike, lines = runs[0], [runs[0]], []
    for run in runs[1:]:
        both = f"{base.name} and {run.name}"
        if unlike := _differing(base, run, _TASK):
            raise UserError(f"{both} cannot be compared: {_words(base, run, unlike)}")
        if unlike := _differing(base, run, _ALIKE):
            lines.append(f"not alike: {both}: {_words(base, run, unlike)}")
        else:
            alike.append(run)
        sizes = [f"{one.number('world_size'):.0f}" for one in (base, run)]
        if sizes[0] != sizes[1]:
            lines.append(f"not alike: {both}: processes {' and '.join(sizes)}")
    header = ["run", "strategy", "comm", "ms/step", "spread", "samples/s", "peak MiB", "comm ms", "hidden"]
    header += ["exposed", "train/loss", "eval/loss", "param_sha256", "parts at", "largest loss gap"]
    rows = [_row(run, base) for run in runs]
    return "\n".join([*lines, *([""] if lines else []), columns([header, *rows]), "", _verdict(runs, alike)])


def _row(run: Run, base: Run) -> list[str]:
    row = [run.name, str(run.result["strategy"]), str(run.result["comm"])]
    row += [f"{statistics.median(_ms_per_step(run)):.2f}", f"± {_spread(run):.2f}"]
    row += [f"{run.number('samples_per_second'):.0f}", f"{run.number('peak_memory_bytes') / 2**20:.0f}"]
    row += [f"{value:.2f}" for value in _comm_ms(run)] or ["", "", ""]
    row += [shown(run.number("train/loss"), 5), shown(run.number("eval/loss"), 5)]
    row.append(str(run.result["param_sha256"])[:12])
    gaps = {} if run is base else _loss_gaps(base, run)
    if not gaps:  # no step that both logged
        return [*row, "", ""]
    parts = parts_at(base, run)
    return [*row, "never" if parts is None else f"step {parts}", f"{max(map(abs, gaps.values())):.2g}"]


def _verdict(runs: Sequence[Run], alike: Sequence[Run]) -> str:
    """Which run is fastest, and whether by more than its steps vary; and which made the same model."""
    base = runs[0]
    fastest, next_one = sorted(runs, key=lambda run: statistics.median(_ms_per_step(run)))[:2]
    fast, slow = (statistics.median(_ms_per_step(run)) for run in (fastest, next_one))
    words = f"verdict: {fastest.name} is fastest, {slow / fast:.2f} x as fast as the next, {next_one.name}"
    if not fast + _spread(fastest) < slow - _spread(next_one):
        words += " (within their spread: no difference shown)"
    if len(alike) == 1:
        return words + "; no two runs are alike enough to compare their models"
    same = [run for run in alike if run.result["param_sha256"] == base.result["param_sha256"]]
    others = [run for run in alike if run not in same]
    if len(same) > 1:
        words += f"; equal to the last bit: the models of {', '.join(run.name for run in same)}"
    else:
        words += f"; no other model equals that of {base.name} to the last bit"
    if broken := [run.name for run in others if _had_to_be_equal(base, run)]:
        words += (
            f"; {', '.join(broken)} had to be equal by train.exact (leaves, environment, settings): a "
            "defect of this program, or a broken machine"
        )
    if gaps := [abs(gap) for run in others for gap in _loss_gaps(base, run).values()]:
        words += f"; loss of the others is at most {max(gaps):.2g} away"
    return words


def _had_to_be_equal(base: Run, run: Run) -> bool:
    """Whether both were exact from step 0 on, with equal leaves, environment and settings of the bits."""
    mine, theirs = run.result.get("exact"), base.result.get("exact")
    if not mine or mine != theirs or mine.get("since") != 0:
        return False
    return not _differing(base, run, _DECIDE)


def parts_at(base: Run, run: Run) -> int | None:
    """The first log step at which losses differ in any bit, or gradients' norms; None: never."""
    for step in sorted(run.scalars.get("train/loss", {})):
        for name, rounding in _FIGURES.items():
            mine, theirs = run.scalars.get(name, {}).get(step), base.scalars.get(name, {}).get(step)
            if mine is not None and theirs is not None and not math.isclose(mine, theirs, rel_tol=rounding):
                return step
    return None


def plot(runs: Sequence[Run], path: Path) -> None:
    """Loss over the steps, and milliseconds per step."""
    with picture(path, 2) as (loss, speed):
        for run in runs:
            losses = run.scalars.get("train/loss", {})
            loss.plot(list(losses), list(losses.values()), label=run.name)
        loss.set(title="train/loss", xlabel="step")
        loss.legend(fontsize=7)
        names = [run.name for run in runs]
        speed.boxplot([_ms_per_step(run) for run in runs], orientation="horizontal", tick_labels=names)
        speed.set(title="ms/step, by log window")
        speed.invert_yaxis()


def _ms_per_step(run: Run) -> list[float]:
    """Of each log window except the first, which is warm-up, unless it is the only one."""
    windows = [ms for ms in run.scalars.get(_MS, {}).values() if ms > 0]
    return windows[1:] or windows or [run.number("ms_per_step")]


def _spread(run: Run) -> float:
    """Half the distance between the quartiles of its log windows."""
    if len(_ms_per_step(run)) < 2:
        return 0.0
    first, _, third = statistics.quantiles(_ms_per_step(run), n=4, method="inclusive")
    return (third - first) / 2


def _comm_ms(run: Run) -> list[float]:
    """Communication per step: total, hidden behind the backward pass, exposed; [] without metrics."""
    windows = [list(run.scalars.get(name, {}).values()) for name in _COMM]
    return [statistics.median(values) for values in windows] if all(windows) else []


def _loss_gaps(base: Run, run: Run) -> dict[int, float]:
    """Loss of `run` minus that of `base`, at each step that both have logged."""
    mine, theirs = run.scalars.get("train/loss", {}), base.scalars.get("train/loss", {})
    return {step: mine[step] - theirs[step] for step in sorted(mine.keys() & theirs.keys())}


def _differing(base: Run, run: Run, names: Sequence[str]) -> list[str]:
    """The settings at or under `names` that have different values, or are missing on one side."""
    mine, theirs = base.settings, run.settings
    keys = [
        key for key in dict.fromkeys((*mine, *theirs)) if any(f"{key}.".startswith(f"{n}.") for n in names)
    ]
    missing = object()
    return [key for key in keys if mine.get(key, missing) != theirs.get(key, missing)]


def _words(base: Run, run: Run, keys: Sequence[str]) -> str:
    pairs = (f"{key} {base.settings.get(key)} and {run.settings.get(key)}" for key in keys)
    return ", ".join(map(printable, pairs))
