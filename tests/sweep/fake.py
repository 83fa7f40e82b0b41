"""Sweeps of simulated trials: a command line as for train.py, and the outcome of each start."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.programs import Ended, Program, started
from tests.ranks import ROOT
from trainer.sweep.trials import read_trials

# In place of train.py in a trial. $ACTS gives what the trial with an override does at each start; the last repeats.
_TRIAL = """
import json, os, signal, sys, time
sys.path.insert(0, os.environ["HOUSE"])
from trainer.launch.new_process import die_with_parent
die_with_parent()
given = dict(word.partition("=")[::2] for word in sys.argv[1:])
run_dir = given["run_dir"].strip("'")
os.makedirs(run_dir + "/checkpoints", exist_ok=True)
open(run_dir + "/run.json", "w").close()
starts = len([name for name in os.listdir(run_dir) if name.startswith("start-")])
with open(f"{run_dir}/start-{starts}", "w") as file:
    about = {"argv": sys.argv[1:], "pid": os.getpid(), "sid": os.getsid(0), "full_error": os.environ.get("HYDRA_FULL_ERROR")}
    json.dump(about, file)
acts = next((acts for word, acts in json.loads(os.environ["ACTS"]).items() if word in sys.argv), ["done"])
act = acts[min(starts, len(acts) - 1)]
lr = float(given.get("optim.lr", "0.1"))
print("words of", act, flush=True)
if act == "wait":
    signal.signal(signal.SIGTERM, lambda *_: (os.makedirs(run_dir + "/checkpoints/step_00000001", exist_ok=True), os._exit(75)))
    with open(run_dir + "/metrics.jsonl", "w") as file:
        for step in range(1, 4):
            file.write(json.dumps({"step": step, "eval/loss": 10 * lr}) + chr(10))
    open(run_dir + "/ready", "w").close()
    time.sleep(100)
if act == "done":
    with open(run_dir + "/metrics.jsonl", "w") as file:
        for step in range(1, 4):
            file.write(json.dumps({"step": step, "eval/loss": lr}) + chr(10))
    with open(run_dir + "/result.json", "w") as file:
        json.dump({"eval/loss": (lr - 0.03) ** 2, "eval/accuracy": 1 - lr, "param_sha256": "abc"}, file)
os._exit(0)
"""

_SWEEPER = """
import sys
sys.path.insert(0, {root!r})
from trainer.launch import new_process
new_process.program = lambda: [sys.executable, {trial!r}]
from ringmaster import main
main()
"""


class Sweep:
    """Sweeps of a test, by default in its folder `sweep`."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path, self.folder = tmp_path, tmp_path / "sweep"
        (tmp_path / "trial.py").write_text(_TRIAL)
        (tmp_path / "sweeper.py").write_text(
            _SWEEPER.format(root=str(ROOT), trial=str(tmp_path / "trial.py"))
        )

    def started(
        self, *overrides: str, acts: dict[str, list[str]] | None = None, **env: str
    ) -> AbstractContextManager[Program]:
        if not any(word.startswith("hydra.sweep.dir=") for word in overrides):
            overrides = (*overrides, f"hydra.sweep.dir={self.folder}")
        environment = {"ACTS": json.dumps(acts or {}), "HOUSE": str(ROOT), **env}
        return started(
            str(self.tmp_path / "sweeper.py"),
            "-m",
            *overrides,
            env=environment,
            cwd=self.tmp_path,
            forks=True,
        )

    def run(self, *overrides: str, acts: dict[str, list[str]] | None = None, **env: str) -> Ended:
        with self.started(*overrides, acts=acts, **env) as program:
            return program.wait()

    def starts(self) -> dict[str, list[dict[str, Any]]]:
        """Return the command line of each start of a trial, by folder."""
        return {
            folder.name: [json.loads(file.read_text()) for file in sorted(folder.glob("start-*"))]
            for folder in sorted(self.folder.iterdir())
            if folder.is_dir()
        }

    def states(self) -> dict[str, str]:
        return {trial.folder: trial.state for trial in read_trials(self.folder)}
