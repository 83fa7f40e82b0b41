"""Compares runs by their files: `python -m trainer.compare RUN RUN ... | SWEEP [--plot FILE]`.

Reads config.yaml, result.json and metrics.jsonl. The other runs are compared with the first.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from trainer.config.overrides import leaves
from trainer.errors import UserError, on_one_line
from trainer.files.untrusted import Fields, load_json, printable
from trainer.run_dir.metrics_file import read_metrics
from trainer.sweep.report import columns
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

_TEXTS = ("strategy", "comm", "param_sha256")
_NUMBERS = ("world_size", "samples_per_second", "ms_per_step", "peak_memory_bytes")
_LOSSES = ("train/loss", "eval/loss")


@dataclass(frozen=True)
class Run:
    name: str
    settings: dict[str, Any]
    result: dict[str, Any]
    scalars: dict[str, dict[int, float]]

    @property
    def ms_per_step(self) -> list[float]:
        """Of each log window except the first, which is warm-up, unless it is the only one."""
        windows = [ms for ms in self.scalars.get(_MS, {}).values() if ms > 0]
        return windows[1:] or windows or [self.result["ms_per_step"]]

    def comm_ms(self) -> list[float]:
        """Communication per step: total, hidden behind the backward pass, exposed; [] without metrics."""
        windows = [list(self.scalars.get(name, {}).values()) for name in _COMM]
        return [statistics.median(values) for values in windows] if all(windows) else []


def read_run(folder: Path, name: str) -> Run:
    """Raises UserError if `folder` is not a finished run."""
    try:
        settings = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"), resolve=False)
        result, scalars = load_json(folder / "result.json"), read_metrics(folder)
        flat = dict(leaves(settings)) if isinstance(settings, dict) else None
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"{folder} is not a finished run: it has no {Path(str(error.filename)).name}"
        ) from error
    except (OSError, ValueError, YAMLError, RecursionError) as error:
        raise UserError(f"{folder} cannot be read: {printable(on_one_line(error))}") from error
    if flat is None:
        raise UserError(f"{folder} is not a run: its config.yaml holds no settings")
    if missing := {*_TEXTS, *_NUMBERS} - result.keys():
        raise UserError(f"{folder} is not a run: its result.json has no {', '.join(sorted(missing))}")
    fields = Fields(f"{folder}/result.json", result)
    texts = {name: fields.text(name) for name in _TEXTS}
    numbers = {  # null: the run was too short
        name: fields.number(name) if fields.has(name) else math.nan for name in (*_NUMBERS, *_LOSSES)
    }
    if numbers["ms_per_step"] <= 0:
        fields.refuse("ms_per_step", "greater than 0")
    exact = {"exact": dict(fields.mapping("exact").values) if fields.has("exact") else None}
    return Run(printable(name), flat, texts | numbers | exact, scalars)


def read_runs(named: Sequence[str]) -> list[Run]:
    """The named runs, and the finished runs of each named sweep.

    Raises:
        UserError: there are less than two, or one is not a run.
    """
    folders: list[Path] = []
    for folder in map(Path, named):
        trials = read_trials(folder)
        folders += [folder / trial.folder for trial in trials if trial.state == DONE] or [folder] * (
            not trials
        )
    short = len({folder.name for folder in folders}) == len(folders)
    runs = [read_run(folder, folder.name if short else str(folder)) for folder in folders]
    if len(runs) < 2:
        raise UserError(f"{' '.join(named)}: {len(runs)} finished run, but two are needed to compare")
    return runs


def compare(runs: Sequence[Run]) -> str:
    """The differences, a table, and a verdict in one line.

    Raises:
        UserError: the data or the task differs, so metrics are not comparable.
    """
    base, lines = runs[0], []
    for run in runs[1:]:
        if unlike := differing(base.settings, run.settings, _TASK):
            raise UserError(f"{base.name} and {run.name} cannot be compared: {_words(base, run, unlike)}")
    flagged = {run.name: differing(base.settings, run.settings, _ALIKE) for run in runs[1:]}
    for run in runs[1:]:
        if flagged[run.name]:
            lines.append(f"not alike: {base.name} and {run.name}: {_words(base, run, flagged[run.name])}")
        if run.result["world_size"] != base.result["world_size"]:
            sizes = f"{base.result['world_size']:.0f} and {run.result['world_size']:.0f}"
            lines.append(f"not alike: {base.name} and {run.name}: processes {sizes}")
    header = ["run", "strategy", "comm", "ms/step", "spread", "samples/s", "peak MiB", "comm ms", "hidden"]
    header += ["exposed", "train/loss", "eval/loss", "param_sha256", "parts at", "largest loss gap"]
    rows = [_row(run, base) for run in runs]
    return "\n".join([*lines, *([""] if lines else []), columns([header, *rows]), "", verdict(runs, flagged)])


def verdict(runs: Sequence[Run], flagged: Mapping[str, Sequence[str]]) -> str:
    """Which run is fastest, and whether by more than its steps vary; and which made the same model."""
    base = runs[0]
    fastest, *others = sorted(runs, key=lambda run: statistics.median(run.ms_per_step))
    slow = statistics.median(others[0].ms_per_step)
    ratio = slow / statistics.median(fastest.ms_per_step)
    apart = statistics.median(fastest.ms_per_step) + _spread(fastest) < slow - _spread(others[0])
    words = f"verdict: {fastest.name} is fastest, {ratio:.2f} x as fast as the next, {others[0].name}"
    words += "" if apart else " (within their spread: no difference shown)"
    like = [run for run in runs[1:] if not flagged[run.name]]
    if not like:
        return words + "; no two runs are alike enough to compare their models"
    same = [run.name for run in like if run.result["param_sha256"] == base.result["param_sha256"]]
    if same:
        words += f"; equal to the last bit: the models of {', '.join([base.name, *same])}"
    else:
        words += f"; no other model equals that of {base.name} to the last bit"
    if broken := [run.name for run in like if run.name not in same and _had_to_be_equal(base, run)]:
        words += (
            f"; {', '.join(broken)} had to be equal by train.exact (leaves, environment, settings): a "
            "defect of this program, or a broken machine"
        )
    gaps = [abs(gap) for run in like if run.name not in same for gap in loss_gaps(base, run).values()]
    if gaps:
        words += f"; loss of the others is at most {max(gaps):.2g} away"
    return words


def _had_to_be_equal(base: Run, run: Run) -> bool:
    """Whether both were exact from step 0 on, with equal leaves, environment and settings of the bits."""
    mine, theirs = run.result.get("exact"), base.result.get("exact")
    if not mine or mine != theirs or mine.get("since") != 0:
        return False
    return not differing(base.settings, run.settings, _DECIDE)


def loss_gaps(base: Run, run: Run) -> dict[int, float]:
    """Loss of `run` minus that of `base`, at each step that both have logged."""
    mine, theirs = run.scalars.get("train/loss", {}), base.scalars.get("train/loss", {})
    return {step: mine[step] - theirs[step] for step in sorted(mine.keys() & theirs.keys())}


def parts_at(base: Run, run: Run) -> int | None:
    """The first log step at which losses differ in any bit, or gradients' norms; None: never."""
    for step in sorted(run.scalars.get("train/loss", {})):
        for name, rounding in _FIGURES.items():
            mine, theirs = run.scalars.get(name, {}).get(step), base.scalars.get(name, {}).get(step)
            if mine is not None and theirs is not None and not math.isclose(mine, theirs, rel_tol=rounding):
                return step
    return None


def differing(mine: Mapping[str, Any], theirs: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The settings at or under `names` that have different values, or are missing on one side."""
    keys = [
        key for key in dict.fromkeys((*mine, *theirs)) if any(f"{key}.".startswith(f"{n}.") for n in names)
    ]
    missing = object()
    return [key for key in keys if mine.get(key, missing) != theirs.get(key, missing)]


def plot(runs: Sequence[Run], path: Path) -> None:
    """Loss and its gap to the first run's over the steps, milliseconds per step, and communication."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, ((loss, gap), (speed, comm)) = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for run in runs:
        losses = run.scalars.get("train/loss", {})
        loss.plot(list(losses), list(losses.values()), label=run.name)
        gaps = loss_gaps(runs[0], run)
        gap.plot(list(gaps), list(gaps.values()), label=run.name)
    names = [run.name for run in runs]
    speed.boxplot([run.ms_per_step for run in runs], orientation="horizontal", tick_labels=names)
    told = [run for run in runs if run.comm_ms()]
    places = range(len(told))
    hidden, exposed = ([run.comm_ms()[part] for run in told] for part in (1, 2))
    comm.barh(places, hidden, label="hidden")
    comm.barh(places, exposed, left=hidden, label="exposed")
    comm.set_yticks(places, [run.name for run in told])
    for axes, title in ((loss, "train/loss"), (gap, "train/loss less the first run's")):
        axes.set(title=title, xlabel="step")
    speed.set(title="ms/step, by log window")
    comm.set(title="communication, ms/step")
    for axes in (speed, comm):
        axes.invert_yaxis()
    loss.legend(fontsize=7)
    if told:
        comm.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.compare", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN|SWEEP", help="a run directory, or the folder of a sweep"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them, as .png, .svg or .pdf")
    given = parser.parse_args(arguments)
    try:
        runs = read_runs(given.runs)
        print(compare(runs))
        if given.plot is not None:
            try:
                plot(runs, given.plot)
            except (OSError, ValueError) as error:  # a folder that does not exist, or an unknown ending
                raise UserError(f"--plot {given.plot}: {error}") from error
            print(given.plot)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _row(run: Run, base: Run) -> list[str]:
    result, comm = run.result, run.comm_ms()
    ms = statistics.median(run.ms_per_step)
    row = [run.name, result["strategy"], result["comm"], f"{ms:.2f}", f"± {_spread(run):.2f}"]
    row += [f"{result['samples_per_second']:.0f}", f"{result['peak_memory_bytes'] / 2**20:.0f}"]
    row += [f"{value:.2f}" for value in comm] or ["", "", ""]
    row += [_number(result["train/loss"]), _number(result["eval/loss"]), result["param_sha256"][:12]]
    if run is base:
        return [*row, "", ""]
    gaps, parts = loss_gaps(base, run), parts_at(base, run)
    if not gaps:  # no step that both logged
        return [*row, "", ""]
    row.append("never" if parts is None else f"step {parts}")
    return [*row, f"{max(map(abs, gaps.values())):.2g}"]


def _spread(run: Run) -> float:
    """Half the distance between the quartiles of its log windows."""
    if len(run.ms_per_step) < 2:
        return 0.0
    first, _, third = statistics.quantiles(run.ms_per_step, n=4, method="inclusive")
    return (third - first) / 2


def _words(base: Run, run: Run, keys: Sequence[str]) -> str:
    pairs = (f"{key} {base.settings.get(key)} and {run.settings.get(key)}" for key in keys)
    return ", ".join(map(printable, pairs))


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.5g}"


if __name__ == "__main__":
    sys.exit(main())
