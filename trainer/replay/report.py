"""The report of `trainer.replay`: what a step computed, as text, tables, a diagram and report.json."""

import csv
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from trainer.distributed.agreement import on_main
from trainer.errors import NonFiniteError, first_few, writing
from trainer.exact.environment import environment
from trainer.files.columns import cell, columns
from trainer.replay.non_finite_watch import NonFinite, NonFiniteWatch
from trainer.replay.observed import Sample, samples_of
from trainer.replay.replayed import Mismatch, Replayed, replayed
from trainer.run_dir.attempts import code_hashes
from trainer.run_dir.console import table
from trainer.run_dir.steps_file import StepRecord, read_steps

log = logging.getLogger("trainer")

_ROWS = 8  # of each printed table; the files have all
_STEPS_AROUND = 100  # in the diagram
_INK, _MARK = "#8a8a8a", "#d9534f"  # legible on light and dark pages


@dataclass(frozen=True)
class ReplayReport:
    """What is known about a step."""

    step: int
    run: str
    processes: str
    checkpoint: str | None
    remade: list[int]  # the first and the last step
    recorded: int  # how many of them the run has recorded
    loss: float
    grad_norm: float
    mismatches: list[Mismatch]
    reasons: list[str]  # why numbers may differ from the record
    error: str | None  # with which the step ended
    non_finite: NonFinite | None
    samples: list[Sample]
    no_losses: str  # why samples have no losses of their own
    parameters: dict[str, dict[str, float]]


def replay(
    run_dir: Path, step: int, overrides: Sequence[str], checkpoint: Path | None, saves_batch: bool
) -> bool:
    """Make step `step` of a run again, print the report and write it to RUN/replay/step_N (a collective).

    Returns:
        Whether all numbers are equal to those that the run has recorded.
    """
    folder = run_dir / "replay" / f"step_{step:08d}"
    with replayed(run_dir, step, overrides, checkpoint) as made:
        run, batches = made.run, made.batches.ahead()
        on_main(lambda: folder.mkdir(exist_ok=True), run.ranks)
        if saves_batch:
            with writing(folder):
                torch.save(batches, folder / f"batch_{run.ranks.rank}.pt")
        progress = run.state.progress
        requests = run.data.train_loader.requests(progress.epoch, progress.samples_in_epoch)
        samples, no_losses = samples_of(run, batches, step)
        watch, error = NonFiniteWatch(run.ranks.rank, requests), None
        with watch.watching(run) as made.epochs.run:
            try:
                made.epochs.step()
            except NonFiniteError as raised:
                error = str(raised)
        recorded, mismatches = made.compared()
        first = watch.first()

        def report() -> None:
            remade = read_steps(Path(run.config.run_dir or ""))
            now = remade.get(step, StepRecord(step, math.nan, math.nan))
            report = ReplayReport(
                step=step,
                run=str(run_dir),
                processes=f"{run.strategy.name}, {run.ranks.world_size} on {run.ranks.device.type}",
                checkpoint=None if made.checkpoint is None else str(made.checkpoint),
                remade=[made.checkpoint_step + 1, step],
                recorded=len(recorded),
                loss=now.loss,
                grad_norm=now.grad_norm,
                mismatches=mismatches,
                reasons=_reasons(made, overrides),
                error=error,
                non_finite=None if math.isfinite(now.loss + now.grad_norm) else first,
                samples=samples,
                no_losses=no_losses,
                parameters=_with_change(*(made.norms.of_step.get(each, {}) for each in (step, step - 1))),
            )
            print(_text(report, step in recorded, folder), flush=True)
            with writing(folder):
                _write(report, {**read_steps(run_dir), **remade}, folder)

        on_main(report, run.ranks)
    return not mismatches


def _with_change(
    now: Mapping[str, Mapping[str, float]], before: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Return the norms of each parameter, those whose gradient has grown most since `before` first."""
    rows = {}
    for name, gradient in now.get("gradient", {}).items():
        earlier = before.get("gradient", {}).get(name, math.nan)
        change = gradient / earlier if earlier else math.nan
        rows[name] = {norm: values[name] for norm, values in now.items()} | {"change": change}
    names = sorted(rows, key=lambda name: -rows[name]["change"] if rows[name]["change"] > 0 else -math.inf)
    return {name: rows[name] for name in names}


def _reasons(made: Replayed, overrides: Sequence[str]) -> list[str]:
    """Return what differs from the attempt that made the step."""
    reasons = [f"overrides: {' '.join(overrides)}"] if overrides else []
    if (attempt := made.attempt) is None:
        return [*reasons, "the run has no code.json, so its environment and code are unknown"]
    now, code = environment(made.run.ranks.device), code_hashes()
    reasons += [
        f"{name} was {was}, is {now.get(name)}"
        for name, was in attempt.environment.items()
        if was != now.get(name)
    ]
    changed = [name for name, was in attempt.code.items() if code.get(name, was) != was]
    return reasons + ([f"changed code: {first_few(changed, 8)}"] if changed else [])


def _text(report: ReplayReport, is_recorded: bool, folder: Path) -> str:
    first, last = report.remade
    equal = "loss and gradient norm have the bits of the record"
    if report.mismatches:
        worst = report.mismatches[0]
        numbers = f"{worst.name} of step {worst.step} was {worst.recorded!r}, is {worst.remade!r}"
        equal = f"NOT equal to the record: {numbers}"
    elif not report.recorded:
        equal = "the run has no record of these steps"
    elif not is_recorded:
        equal = f"{equal}; the run ended before it recorded step {last}"
    rows = {
        "run": f"{report.run} ({report.processes})",
        "start": report.checkpoint or "initial weights",
        "steps made": f"{first} to {last}: {equal}",
    }
    if report.mismatches:
        rows["reasons"] = (
            "; ".join(report.reasons) or "unknown: code, torch and hardware are those of the run"
        )
    rows[f"step {last}"] = f"loss {report.loss:.6g}, gradient norm {report.grad_norm:.6g}"
    if report.non_finite is not None:
        rows["first NaN or Inf"] = str(report.non_finite)
    rows["error"] = report.error or "none"
    samples = [["sample", "loss", "rank", "epoch", "hash", "label or text"]]
    samples += [
        [each.name, cell(each.loss), str(each.rank), str(each.epoch), each.hash, each.shown]
        for each in report.samples[:_ROWS]
    ]
    norms = [["parameter", "gradient", "weight", "update", "gradient / step before"]]
    for name, values in [*report.parameters.items()][:_ROWS]:
        norms.append(
            [name, *(cell(values.get(key), ".4g") for key in ("gradient", "weight", "update", "change"))]
        )
    title = (
        f"samples without losses of their own ({report.no_losses})"
        if report.no_losses
        else "samples, highest loss first"
    )
    blocks = [
        table(rows),
        f"{title}\n{columns(samples)}",
        f"parameters, largest change first\n{columns(norms)}",
    ]
    return "\n\n".join([*blocks, f"files: {folder}"])


def _write(report: ReplayReport, steps: Mapping[int, StepRecord], folder: Path) -> None:
    (folder / "report.json").write_text(json.dumps(asdict(report), indent=1, default=str) + "\n")
    for name, header, rows in (
        ("samples", Sample._fields, report.samples),
        (
            "parameters",
            ("parameter", "gradient", "weight", "update", "change"),
            [(name, *values.values()) for name, values in report.parameters.items()],
        ),
    ):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([header, *rows])
    _draw(report, steps, folder / "step.png")


def _draw(report: ReplayReport, steps: Mapping[int, StepRecord], path: Path) -> None:
    """Draw the losses of the steps around this one, of its samples, and the change of each gradient."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained", facecolor="none")
    around, of_samples, of_parameters = figure.subplots(1, 3)
    near = [s for s in steps.values() if abs(s.step - report.step) <= _STEPS_AROUND and math.isfinite(s.loss)]
    around.plot([each.step for each in near], [each.loss for each in near], color=_INK)
    around.axvline(report.step, color=_MARK)
    around.set_title("loss by step", color=_INK)
    losses = [each.loss for each in report.samples if each.loss is not None and math.isfinite(each.loss)]
    of_samples.plot(losses, ".", color=_MARK)
    of_samples.set_title(f"losses of the samples of step {report.step}", color=_INK)
    changes = {n: v["change"] for n, v in report.parameters.items() if math.isfinite(v["change"])}
    shown = [*changes][:12][::-1]
    of_parameters.barh(shown, [changes[name] for name in shown], color=_MARK)
    of_parameters.set_title("gradient norm / that of the step before", color=_INK)
    for axes in (around, of_samples, of_parameters):
        axes.set_facecolor("none")
        axes.tick_params(colors=_INK)
        axes.spines[:].set_color(_INK)
    figure.savefig(path, dpi=110)
