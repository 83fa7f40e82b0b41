"""Compare the files of two runs: settings, environment, code, and the numbers recorded for each step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.saved_run import differing_settings, saved_values
from trainer.errors import UserError
from trainer.files import failure_file
from trainer.run_dir.attempts import RunAttempt, attempt_of
from trainer.run_dir.steps_file import read_steps
from trainer.sweep.trials import RunFiles

# Settings that do not change what a step computes.
_IGNORED = ["logger", "launch", "checkpoint", "data.prefetch_factor", "data.pin_memory"]
_IGNORED += ["data.download", "comm.timeline", "distributed.timeout_s"]
_IGNORED += [f"distributed.{name}" for name in ("init_method", "rank", "world_size", "shrink")]
_IGNORED += [f"train.{name}" for name in ("log_every_steps", "show_every", "check_replicas_every")]
_IGNORED += [f"train.{name}" for name in ("histograms_every", "peak_tflops", "profile", "max_hours")]


@dataclass(frozen=True)
class Divergence:
    """The step at which the records of two runs diverge.

    Attributes:
        step: the first step whose numbers differ; None if all are equal.
        equal: the last step before it that both runs have recorded; 0 if there is none.
    """

    step: int | None
    equal: int
    words: str


class RecordedRun(RunFiles):
    """The files of a run, and the code and interpreter with which to rerun its steps.

    Attributes:
        folder: the run directory.
        code: the folder from which its code is imported.
        python: the interpreter.
    """

    def __init__(self, folder: Path, code: Path, python: str) -> None:
        super().__init__(folder.resolve())
        self.code = code.resolve()
        # the replay starts in `code`; a link to an interpreter is its virtual environment
        self.python = str(Path(python).absolute()) if "/" in python else python
        self.settings = saved_values(folder)
        self.steps = read_steps(folder)
        self.failure: dict[str, Any] = {} if self.result else failure_file.read(folder) or {}

    def attempt(self, step: int) -> RunAttempt:
        """Return the attempt that ran `step`. Raises UserError if it is unknown."""
        attempt = attempt_of(self.folder, step)
        if attempt is None:
            raise UserError(
                f"{self.folder} has no record of its code and environment: code.json is damaged, or the run "
                "was trained with an earlier version of Ringmaster that did not write this file; train again"
            )
        return attempt


def setting_rows(one: RecordedRun, other: RecordedRun) -> tuple[list[list[str]], list[str]]:
    """Return (name, value in A, value in B) of settings, and names of settings that cannot change a step."""
    both = [one.settings, other.settings]
    names = differing_settings(both)
    if "strategy.name" in names:  # which then has other settings
        names = [n for n in names if not n.startswith("strategy.") or all(n in s for s in both)]
    apart = [name for name in names if any(f"{name}.".startswith(f"{prefix}.") for prefix in _IGNORED)]
    return _rows(both, [name for name in names if name not in apart]), apart


def environment_rows(one: RunAttempt, other: RunAttempt) -> list[list[str]]:
    """Return (name, value in A, value in B) of all facts that differ."""
    facts = [
        {
            "strategy": each.strategy,
            "processes": str(each.world_size),
            "resumed after step": str(each.first_step),
            **each.environment,
        }
        for each in (one, other)
    ]
    return _rows(facts, differing_settings(facts))


def code_rows(one: RunAttempt, other: RunAttempt) -> list[list[str]]:
    """Return (name, value in A, value in B) of the git commit and the modules that differ."""
    facts = [{"git commit": each.git or "none", **each.code} for each in (one, other)]
    return _rows(facts, differing_settings(facts))


def _rows(facts: Sequence[Mapping[str, str]], names: Sequence[str]) -> list[list[str]]:
    return [[name, *(each.get(name, "none") for each in facts)] for name in names]


def divergence(one: RecordedRun, other: RecordedRun, tolerance: float) -> Divergence:
    """Compare losses, gradient norms and hashes of weights, step by step."""
    common = sorted(one.steps.keys() & other.steps.keys())
    hashes = [run.scalars.get("weights_hash", {}) for run in (one, other)]
    equal = 0
    for step in common:
        for name in ("loss", "grad_norm"):
            mine, theirs = (getattr(run.steps[step], name) for run in (one, other))
            if (apart := ulp(mine, theirs)) > tolerance:
                words = name.replace("grad_norm", "gradient norm")
                return Divergence(
                    step, equal, f"{words} of step {step}: {mine!r} and {theirs!r} ({apart:.3g} ulp)"
                )
        if not tolerance and step in hashes[0] and hashes[0][step] != hashes[1].get(step, hashes[0][step]):
            return Divergence(step, equal, f"hash of the weights after step {step}")
        equal = step
    for name, run in (("A", one), ("B", other)):
        failed = run.failure.get("step")
        if isinstance(failed, int) and failed > equal:
            return Divergence(failed, equal, f"{name} failed in step {failed}: {run.failure.get('message')}")
    if not common:
        raise UserError(
            f"{one.folder} and {other.folder} have recorded no step in common; set --step to a step that "
            "both have completed"
        )
    ends = [run.result.get("param_sha256") for run in (one, other)]
    same_end = one.result.get("steps") == other.result.get("steps")
    if not tolerance and all(ends) and same_end and ends[0] != ends[1]:
        return Divergence(equal, equal, "hashes of the final models (param_sha256)")
    return Divergence(None, equal, "")


def ulp(one: float, other: float) -> float:
    """Return the difference in units in the last place of float32; 0 for equal numbers, and for two NaN."""
    if repr(one) == repr(other):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / 2.0 ** (math.frexp(max(abs(one), abs(other)))[1] - 24)
