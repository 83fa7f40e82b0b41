"""Show the state of every run below a folder.

`python -m trainer.status [DIR ...] [--watch] [--json]` reads a few small files of each run, without changing
or locking them. It does not import torch.
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer.checkpoint.evaluations import FILE as EVALUATIONS
from trainer.checkpoint.evaluations import Evaluations
from trainer.errors import StoppedBySignal, UserError, first_line
from trainer.failures import processes
from trainer.files import failure_file
from trainer.files.columns import cell, columns
from trainer.files.untrusted import load_json, printable, reason
from trainer.run_dir import LOCK, RENEW_S, RUN
from trainer.run_dir.metrics_file import FILE as METRICS
from trainer.run_dir.metrics_file import RESULT, last_metrics
from trainer.sweep.trials import FILE as TRIALS
from trainer.sweep.trials import PRUNED, read_trials

# States that need attention come first.
_STATES = ["failed", "lost", "suspended", "stopped", "queued", "running", "pruned", "done"]
_WITH_REASON = {"failed", "lost", "suspended", "queued"}  # the reason takes the place of the numbers
_HEADER = ["run", "state", "step", "left", "train", "eval", "best", "samples/s", "host"]
_SILENT_S = 4 * RENEW_S  # an NFS client may show a time that is a minute old
_DEFAULT, _WIDTH, _REFRESH_S = "runs", 100, 5.0


def look(folder: Path, pruned: Collection[Path] = ()) -> dict[str, Any]:
    """Return the state of the run in `folder` as a JSON object; values that its files lack are None.

    The files of a pruned trial say only that a signal stopped it, so `pruned` contains the folders of pruned
    trials.
    """
    damaged: list[str] = []

    def read(function: Callable[[Path], Any], name: str) -> Any:
        try:
            return function(folder / name)
        except FileNotFoundError:
            return {}
        except Exception as error:  # a file may contain anything
            words = str(error) if isinstance(error, UserError) else f"{folder / name}: {reason(error)}"
            damaged.append(words)
            return {"message": words}

    plan, result, end, owner = (read(load_json, name) for name in (RUN, RESULT, failure_file.NAME, LOCK))
    metrics = _numbers(read(lambda file: last_metrics(file.parent), METRICS))
    evaluated = read(lambda file: _evaluated(Evaluations.read(file.parent), plan), EVALUATIONS)
    result, numbers = _numbers(result), _numbers(plan)
    if result.get("steps", 0) < metrics.get("step", 0):
        result = {}  # the run has been resumed since, with more steps
    renewed_at = _written_at(folder / LOCK)
    ended_at = _written_at(folder / RESULT, folder / failure_file.NAME)
    state, why = _state(owner, renewed_at, ended_at, result, end)
    if state == "stopped" and folder in pruned:
        state = "pruned"
    elif state in ("stopped", "failed", "lost") and (job := _queued_job(folder)):
        state, why = "queued", f"SLURM job {job} has not started: squeue --jobs={job}"
    step = max(metrics.get("step", 0), result.get("steps", 0), _numbers(end).get("step", 0))
    total, made = numbers.get("total_steps"), step - numbers.get("first_step", 0)
    left_s = None
    if state == "running" and total is not None and made > 0:
        left_s = (_written_at(folder / METRICS) - _written_at(folder / RUN)) / made * (total - step)
    return {
        "run": str(folder),
        "state": state,
        "reason": why,
        "step": step,
        "total_steps": total,
        "left_s": left_s,
        "train/loss": (metrics | result).get("train/loss"),
        **{name: _numbers(evaluated).get(name) for name in ("eval/loss", "best", "best_step")},
        "best_metric": evaluated.get("best_metric"),
        "samples_per_second": result.get("samples_per_second", metrics.get("usage/samples_per_second")),
        "host": owner.get("host"),
        "silent_s": time.time() - max(renewed_at, ended_at),
        "failure": end or None,
        "damaged": damaged,
    }


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the finite numbers, since JSON has no NaN."""
    found = ((name, value) for name, value in values.items() if type(value) in (int, float))
    return {name: value for name, value in found if math.isfinite(value)}


def _written_at(*files: Path) -> float:
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def _evaluated(evaluations: Evaluations, plan: Mapping[str, Any]) -> dict[str, Any]:
    if (last := evaluations.last) is None:
        return {}
    # Not a KeepBest, because importing it loads Hydra, which takes half a second.
    best: Any = SimpleNamespace(**{"metric": "eval/loss", "mode": "min", **plan.get("best", {})})
    state = evaluations.best(last, best) or last
    found = {"best": evaluations.of(state).get(best.metric), "best_metric": best.metric}
    return found | {"best_step": state.step, "eval/loss": evaluations.of(last).get("eval/loss")}


def _state(
    owner: Mapping[str, Any], renewed_at: float, ended_at: float, result: object, end: Mapping[str, Any]
) -> tuple[str, str | None]:
    """Return one of _STATES, and the reason if a file or the process gives one.

    On the run's own host, its process shows whether the run is alive. On other hosts, the modification time
    of its lock file does, because a live run updates it regularly.
    """
    here = {"host": socket.gethostname(), "surroundings": processes.surroundings()}
    process, pid = None, owner.get("pid")
    if isinstance(pid, int) and here.items() <= owner.items():
        process = processes.state(pid)
    if process == "stopped":
        return "suspended", f"process {pid} is suspended (SIGSTOP); resume it with kill -CONT {pid}"
    is_silent = time.time() - renewed_at > _SILENT_S
    if process != "dead" and not is_silent and (process == "running" or renewed_at > ended_at):
        return "running", None
    if end:
        is_stop = end.get("status") == StoppedBySignal.exit_code
        return "stopped" if is_stop else "failed", first_line(str(end.get("message")))
    if result:
        return "done", None
    if process == "dead":
        return "lost", f"process {pid} ended without a message: killed, or out of memory"
    since = f"{datetime.fromtimestamp(renewed_at):%F %H:%M}"
    return "lost", f"no sign of life from process {pid} on {owner.get('host')} since {since}"


def _queued_job(folder: Path) -> str | None:
    slurm = folder / "slurm"
    with contextlib.suppress(OSError):
        job = (slurm / "id").read_text()
        if not (slurm / "stop").exists() and not any(slurm.glob(f"{job}[._]*")):
            return printable(job)
    return None


def report(folders: Sequence[str], as_json: bool, width: int) -> str:
    """Return the table, or the JSON, of all runs below `folders`, including the trials of sweeps."""
    runs: list[dict[str, Any]] = []
    pruned: set[Path] = set()
    damaged: list[str] = []
    for top in folders:
        if not Path(top).is_dir() and top != _DEFAULT:
            raise UserError(f"{printable(top)} is not a directory; pass the folder that contains your runs")
        for folder, names, files in os.walk(top, onerror=lambda error: damaged.append(str(error))):
            if TRIALS in files:
                try:
                    trials = read_trials(Path(folder))
                    pruned |= {Path(folder, trial.folder) for trial in trials if trial.state == PRUNED}
                except (OSError, ValueError, TypeError) as error:
                    damaged.append(f"{Path(folder, TRIALS)} cannot be read: {reason(error)}")
            if RUN in files or ("slurm" in names and _queued_job(Path(folder))):
                runs.append(look(Path(folder), pruned))
                names[:] = [name for name in names if name != "checkpoints"]
    runs.sort(key=lambda run: (_STATES.index(run["state"]), run["silent_s"]))
    damaged += [words for run in runs for words in run["damaged"]]
    if as_json:
        return json.dumps(runs, indent=2)
    if not runs:
        damaged.insert(0, f"no runs in {', '.join(folders)}: no folder there contains {RUN}")
        return "\n".join(map(printable, damaged))
    shared = folders[0] if len(folders) == 1 else "."
    header, *lines = columns([_HEADER, *(_cells(run, shared) for run in runs)]).splitlines()
    at = header.index("left")
    for number, run in enumerate(runs):
        if run["state"] in _WITH_REASON:  # the reason instead of numbers
            lines[number] = f"{lines[number]:<{at}}{printable(run['reason'])}"
    counts = Counter(run["state"] for run in runs)
    total = f"{len(runs)} runs: {', '.join(f'{counts[state]} {state}' for state in _STATES if counts[state])}"
    table = [line if len(line) <= width else f"{line[: width - 3]}..." for line in (header, *lines)]
    return "\n".join([*table, "", total, *map(printable, damaged)])


def _cells(run: Mapping[str, Any], top: str) -> list[str]:
    name, total, left_s = os.path.relpath(run["run"], top), run["total_steps"], run["left_s"]
    if len(name) > 30:  # the name of a trial begins with its number, and ends with its settings
        name = f"{name[:8]}...{name[-19:]}"
    cells = [name, run["state"], str(run["step"]) if total is None else f"{run['step']}/{total}"]
    if run["state"] in _WITH_REASON:
        return [*cells, *[""] * 6]
    minutes, seconds = divmod(round(left_s or 0), 60)
    left = "" if left_s is None else f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
    losses = [cell(run[name], ".4g") for name in ("train/loss", "eval/loss", "best")]
    return [
        *cells,
        left,
        *losses,
        cell(run["samples_per_second"], ".0f"),
        str(run["host"] or "").partition(".")[0],
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m trainer.status", description=about)
    where = "folders that contain runs, at any depth (default: runs)"
    parser.add_argument("dirs", nargs="*", metavar="DIR", default=[_DEFAULT], help=where)
    parser.add_argument("--watch", action="store_true", help=f"refresh the table every {_REFRESH_S:.0f} s")
    parser.add_argument("--json", action="store_true", help="print a JSON list, with untruncated messages")
    options = parser.parse_args(arguments)
    try:
        while True:
            shown = report(options.dirs, options.json, shutil.get_terminal_size((_WIDTH, 24)).columns)
            clear = "\x1b[H\x1b[2J" if options.watch and sys.stdout.isatty() else ""
            print(f"{clear}{shown}", flush=True)
            if not options.watch:
                return 0
            time.sleep(_REFRESH_S)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly if `| head` closes the pipe
    sys.exit(main())
