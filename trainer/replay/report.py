"""The report of `trainer.replay`: what a step computed, as text, tables, a diagram and report.json."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.distributed.agreement import on_main
from trainer.errors import NonFiniteError, first_few, writing
from trainer.exact.environment import environment
from trainer.files import failure_file
from trainer.files.columns import cell, columns
from trainer.replay.non_finite_watch import NonFiniteWatch
from trainer.replay.observed import Sample, samples_of
from trainer.replay.replayed import Mismatch, Replayed, replayed
from trainer.run_dir.attempts import code_hashes
from trainer.run_dir.console import table
from trainer.run_dir.steps_file import StepRecord, read_steps

_ROWS = 8  # of each printed table; the files contain all rows
_STEPS_AROUND = 100  # in the diagram
_INK, _MARK = "#8a8a8a", "#d9534f"  # legible on light and dark pages
_NORMS = ("gradient", "weight", "update", "change")


def replay(
    run_dir: Path, step: int, overrides: Sequence[str], checkpoint: Path | None, saves_batch: bool
) -> bool:
    """Repeat step `step` of a run, print the report and write it to RUN/replay/step_N (a collective).

    Returns:
        Whether all numbers equal those that the run recorded.
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
            norms = _with_change(*(made.norms.of_step.get(each, {}) for each in (step, step - 1)))
            is_finite = math.isfinite(now.loss + now.grad_norm)
            rows = {
                "run": f"{run_dir} ({run.strategy.name}, processes: {run.ranks.world_size})",
                "start": str(made.checkpoint or "the initial weights"),
                "steps rerun": f"{run.plan.steps_before + 1} to {step}",
                **_comparison(made, recorded, mismatches, overrides),
                f"step {step}": f"loss {now.loss:.6g}, gradient norm {now.grad_norm:.6g}",
                **({} if is_finite or first is None else {"first NaN or Inf": str(first)}),
                **({"error": error} if error else {}),
            }
            print(_text(rows, samples, no_losses, norms), f"files: {folder}", sep="\n\n", flush=True)
            facts: dict[str, Any] = {"summary": rows, "mismatches": [each._asdict() for each in mismatches]}
            facts["non_finite"] = None if is_finite or first is None else first._asdict()
            with writing(folder):
                _write(folder, facts, samples, norms)
                _draw(folder / "step.png", step, {**read_steps(run_dir), **remade}, samples, norms)

        on_main(report, run.ranks)
    return not mismatches


def _with_change(
    now: Mapping[str, Mapping[str, float]], before: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Return the norms of each parameter, sorted by how much its gradient has grown since `before`."""
    rows = {}
    for name, gradient in now.get("gradient", {}).items():
        earlier = before.get("gradient", {}).get(name, math.nan)
        change = gradient / earlier if earlier else math.nan
        rows[name] = {norm: values[name] for norm, values in now.items()} | {"change": change}
    return dict(sorted(rows.items(), key=lambda row: change if (change := row[1]["change"]) > 0 else 0)[::-1])


def _comparison(
    made: Replayed, recorded: Sequence[int], mismatches: Sequence[Mismatch], overrides: Sequence[str]
) -> dict[str, str]:
    """Return rows of the table: whether numbers equal the recorded ones, and otherwise why they differ."""
    if mismatches:
        first = mismatches[0]
        difference = (
            f"step {first.step}, {first.name} was recorded as {first.recorded!r}, "
            f"but replayed as {first.remade!r}"
        )
        reasons = "; ".join(why_different(made, overrides)) or "none found in settings, code and environment"
        return {"record": f"DIFFERENT: {difference}", "reasons": reasons}
    words = f"equal, bit for bit, in steps {recorded[0]} to {recorded[-1]}" if recorded else "no such steps"
    if made.step not in recorded:
        failure = failure_file.read(made.run_dir) or {}
        words += f"; the run failed in step {made.step}" if failure.get("step") == made.step else ""
    return {"record": words}


def why_different(made: Replayed, overrides: Sequence[str]) -> list[str]:
    """Return how settings, environment and code differ from the attempt that ran the step."""
    reasons = [f"overrides: {' '.join(overrides)}"] if overrides else []
    if (attempt := made.attempt) is None:
        return [*reasons, "the run has no code.json, so its environment and code are unknown"]
    now, code = environment(made.run.ranks.device), code_hashes()
    pairs = ((name, was, now.get(name)) for name, was in attempt.environment.items())
    reasons += [f"{name} was {was}, is {is_now}" for name, was, is_now in pairs if was != is_now]
    changed = [name for name, was in attempt.code.items() if code.get(name, was) != was]
    return reasons + ([f"changed code: {first_few(changed, 8)}"] if changed else [])


def _text(
    rows: Mapping[str, str],
    samples: Sequence[Sample],
    no_losses: str,
    norms: Mapping[str, Mapping[str, float]],
) -> str:
    title = f"samples, without losses ({no_losses})" if no_losses else "samples, highest loss first"
    shown = [["sample", "loss", "rank", "epoch", "hash", "label or text"]]
    for each in samples[:_ROWS]:
        shown.append([each.name, cell(each.loss), *map(str, (each.rank, each.epoch, each.hash, each.shown))])
    parameters = [["parameter", *_NORMS[:-1], "gradient / previous step"]]
    for name, values in list(norms.items())[:_ROWS]:
        parameters.append([name, *(cell(values.get(norm), ".4g") for norm in _NORMS)])
    tables = {title: shown, "parameters, largest change of the gradient first": parameters}
    return "\n\n".join([table(rows), *(f"{title}\n{columns(cells)}" for title, cells in tables.items())])


def _write(
    folder: Path,
    facts: Mapping[str, Any],
    samples: Sequence[Sample],
    norms: Mapping[str, Mapping[str, float]],
) -> None:
    (folder / "report.json").write_text(json.dumps(facts, indent=1) + "\n")
    parameters = [[name, *(values.get(norm) for norm in _NORMS)] for name, values in norms.items()]
    tables: dict[str, list[Any]] = {
        "samples": [Sample._fields, *samples],
        "parameters": [["parameter", *_NORMS], *parameters],
    }
    for name, rows in tables.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)


def _draw(
    path: Path,
    step: int,
    steps: Mapping[int, StepRecord],
    samples: Sequence[Sample],
    norms: Mapping[str, Mapping[str, float]],
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained", facecolor="none")
    around, of_samples, of_parameters = figure.subplots(1, 3, subplot_kw={"facecolor": "none"})
    near = [each for each in steps.values() if abs(each.step - step) <= _STEPS_AROUND]
    around.plot([each.step for each in near], [each.loss for each in near], color=_INK)
    around.axvline(step, color=_MARK)
    losses = [math.nan if each.loss is None else each.loss for each in samples]
    of_samples.plot(losses, ".", color=_MARK)
    changes = [(name, values["change"]) for name, values in norms.items() if math.isfinite(values["change"])]
    names, ratios = zip(*changes[11::-1], strict=True) if changes else ((), ())
    of_parameters.barh(names, ratios, color=_MARK)
    titles = ("loss by step", f"losses of the samples of step {step}", "gradient norm / previous step")
    for axes, title in zip((around, of_samples, of_parameters), titles, strict=True):
        axes.set_title(title, color=_INK)
        axes.tick_params(colors=_INK)
        axes.spines[:].set_color(_INK)
    figure.savefig(path, dpi=110)
