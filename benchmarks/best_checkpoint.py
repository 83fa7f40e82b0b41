"""Check that the best checkpoint is kept when a run stops at or near an evaluation, and resumes.

In each case, SIGTERM, SIGKILL or an exception stops a run in a step, a save, an evaluation or between them.
The run is then resumed to its end, or stopped again right after the resume. Three sources must agree on the
best step of an uninterrupted run: evaluations.jsonl, metrics.jsonl and `--checkpoint best`. No step may have
two rows in metrics.jsonl, and another resume must not evaluate again. Prints a row for each case; the exit
status is 1 if a case is wrong.

    python -m benchmarks.best_checkpoint [--strategies single ddp fsdp] [--resumes once twice] [--json FILE]
        [--ends SIGTERM SIGKILL exception] [--set checkpoint.async=true ...]
"""

import argparse
import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tests.failure_parts import inject
from tests.programs import finish
from trainer.checkpoint.evaluations import Evaluations
from trainer.checkpoint.finding import candidates
from trainer.checkpoint.listing import Listing
from trainer.checkpoint.manifest import step_of
from trainer.config import KeepBest
from trainer.config.saved_run import saved_settings

ENDS = {"SIGTERM": "term", "SIGKILL": "kill", "exception": "raise"}
PHASES = {"step": "forward", "save": "checkpoint", "evaluation": "evaluate", "between": "log"}
STRATEGIES = {"single": [], **{name: ["launch=local", "launch.processes=2"] for name in ("ddp", "fsdp")}}
SAVES = {"same steps": 4, "apart": 3}
# The first evaluation is the best one; a run that forgets it deletes its checkpoint.
BEST = KeepBest("eval/loss", "max")
_DEADLINE_S = 300


def run(run_dir: Path, strategy: str, every: int, *overrides: str, more: Sequence[str] = ()) -> int:
    """Train, or resume, and return the exit status."""
    words = ["logger=jsonl", "model.hidden=[16]", "train.global_batch_size=64", "train.max_steps=10"]
    words += ["train.eval_every_steps=4", "train.eval_every_epochs=0", "train.log_every_steps=1"]
    words += [f"checkpoint.every_steps={every}", "checkpoint.every_epochs=null", "checkpoint.keep_last=1"]
    words += [f"checkpoint.keep_best={{metric: {BEST.metric}, mode: {BEST.mode}}}", "schedule.warmup_steps=0"]
    words += [f"strategy={strategy}", *STRATEGIES[strategy], f"run_dir={run_dir}", "resume=auto"]
    return finish("train.py", *words, *more, *overrides, timeout_s=_DEADLINE_S, forks=True).code


def sources(run_dir: Path) -> dict[str, int | None]:
    """Return the best step according to each source."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    logged = {row["step"]: row[BEST.metric] for row in rows if BEST.metric in row}
    config = saved_settings(run_dir, [])
    current = next(iter(Listing(run_dir / "checkpoints").own().values())).state
    recorded = Evaluations.read(run_dir).best(current, BEST)
    return {
        "evaluations.jsonl": recorded and recorded.step,
        "metrics.jsonl": max(logged, key=logged.__getitem__),
        "--checkpoint best": step_of(candidates(run_dir, None, "best", config.checkpoint)[0].name),
    }


def problems(run_dir: Path, expected: dict[str, object], again: Callable[[], int]) -> list[str]:
    """Return descriptions of what is wrong with a finished run; `again` resumes it another time."""
    found = []
    result = json.loads((run_dir / "result.json").read_text())
    if result["param_sha256"] != expected["param_sha256"]:
        found.append("different hash")
    if (named := sources(run_dir)) != expected["sources"]:
        found.append(f"different best step: {named}")
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found += [f"step {step} has {number} rows" for step, number in Counter(steps).items() if number > 1]
    before = (run_dir / "train.log").read_text().count("eval at step")
    again()
    if (run_dir / "train.log").read_text().count("eval at step") != before:
        found.append("another resume evaluates again")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=[*STRATEGIES])
    parser.add_argument("--resumes", nargs="+", choices=["once", "twice"], default=["once", "twice"])
    parser.add_argument("--ends", nargs="+", choices=ENDS, default=[*ENDS])
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of every run")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    start = partial(run, more=chosen.set)
    rows = []
    for strategy, (saves, every) in itertools.product(chosen.strategies, SAVES.items()):
        with tempfile.TemporaryDirectory() as folder:
            uninterrupted = Path(folder, "uninterrupted")
            assert start(uninterrupted, strategy, every) == 0
            result = json.loads((uninterrupted / "result.json").read_text())
            expected = {"param_sha256": result["param_sha256"], "sources": sources(uninterrupted)}
            assert set(expected["sources"].values()) == {4}, expected
            for resumes, end, phase in itertools.product(chosen.resumes, chosen.ends, PHASES):
                run_dir = Path(folder, f"{resumes}-{end}-{phase}")
                mark = Path(folder, f"{run_dir.name}.mark")
                first = inject(ENDS[end], rank=0, step=4, phase=PHASES[phase], mark=mark)
                statuses = [start(run_dir, strategy, every, *first)]
                if resumes == "twice":
                    again = inject("term", rank=0, step=5, mark=mark.with_suffix(".again"))
                    statuses.append(start(run_dir, strategy, every, *again))
                statuses.append(start(run_dir, strategy, every))
                wrong = problems(run_dir, expected, partial(start, run_dir, strategy, every))
                if not mark.exists() or statuses[-1] != 0:
                    wrong.append(f"the failure did not happen, or the run did not end: statuses {statuses}")
                case = {"strategy": strategy, "saves": saves, "end": end, "in": phase, "resumed": resumes}
                rows.append({**case, "wrong": wrong})
                print(
                    f"{'  '.join(f'{value:10}' for value in case.values())}  {wrong or 'correct'}", flush=True
                )
    if chosen.json is not None:
        chosen.json.write_text(
            json.dumps({"set": chosen.set, "rows": rows, "best": vars(BEST)}, indent=1) + "\n"
        )
    bad = sum(bool(row["wrong"]) for row in rows)
    print(f"{len(rows) - bad} of {len(rows)} cases are correct")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
