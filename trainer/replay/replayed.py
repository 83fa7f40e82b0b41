"""Restore a run as it was before one of its steps, by rerunning its steps from a checkpoint."""

import logging
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from trainer.assemble import assemble
from trainer.checkpoint.listing import Listing
from trainer.config import Config, flatten
from trainer.config.saved_run import saved_settings
from trainer.context import Run
from trainer.data.loading.loaders import Batches
from trainer.distributed.agreement import compare_across_ranks, on_main
from trainer.distributed.gather_samples import gathering
from trainer.distributed.process_group import process_group
from trainer.errors import UserError
from trainer.launch.rank_info import rank_info
from trainer.launch.signals import StopRequest
from trainer.loop import Epochs
from trainer.replay.observed import ParameterNorms
from trainer.run import why_no_gather
from trainer.run_dir.attempts import RunAttempt, attempt_of, read_attempts
from trainer.run_dir.claim import run_id_of
from trainer.run_dir.console import terminal
from trainer.run_dir.metrics_file import read_metrics
from trainer.run_dir.steps_file import read_steps

log = logging.getLogger("trainer")


class Mismatch(NamedTuple):
    """A number in a rerun step that differs from the number that the run recorded."""

    step: int
    name: str  # loss, grad_norm or weights_hash
    recorded: float
    remade: float


@dataclass
class Replayed:
    """A run in this process, with the state that it had before `step`. It never writes to `run_dir`.

    Attributes:
        epochs: `epochs.step()` runs the next step; its first call runs `step`.
        attempt: the attempt of the run that ran `step`; None if it is unknown.
        checkpoint: the checkpoint from which the replay started; None: from the initial weights.
        norms: the norms of parameters in `step` and the step before.
        evaluations: the recorded metrics of each evaluation, by step.
    """

    epochs: Epochs
    run_dir: Path
    step: int
    attempt: RunAttempt | None
    checkpoint: Path | None
    norms: ParameterNorms
    evaluations: Mapping[int, Mapping[str, float]]

    @property
    def run(self) -> Run:
        return self.epochs.run

    @property
    def batches(self) -> Batches:
        """The rest of the epoch, starting with the batch of the next step (a collective)."""
        while (batches := self.epochs.open()) is None:
            pass
        return batches

    def use_evaluation(self) -> None:
        """Pass the recorded metrics of the evaluation after the last step, if any, to the schedule."""
        state, step = self.run.state, self.run.state.progress.step
        if step in self.evaluations and state.progress.evaluated_step != step:
            state.after_evaluation(self.evaluations[step])

    def compared(self) -> tuple[list[int], list[Mismatch]]:
        """Compare the steps that were rerun so far with what the run recorded (a collective).

        Returns:
            The rerun steps that the run has recorded, and all numbers that differ from the recorded ones.
        """
        self.run.report.meter.record_steps()
        return on_main(self._compared, self.run.ranks)

    def _compared(self) -> tuple[list[int], list[Mismatch]]:
        assert self.run.config.run_dir is not None
        remade_dir = Path(self.run.config.run_dir)
        recorded, found = read_steps(self.run_dir), list[Mismatch]()
        remade = {step: record for step, record in read_steps(remade_dir).items() if step in recorded}
        for step, own in remade.items():
            found += [
                Mismatch(step, name, getattr(recorded[step], name), getattr(own, name))
                for name in ("loss", "grad_norm")
                if repr(getattr(recorded[step], name)) != repr(getattr(own, name))
            ]
        hashes = read_metrics(self.run_dir).get("weights_hash", {})
        for step, value in read_metrics(remade_dir).get("weights_hash", {}).items():
            if step in hashes and hashes[step] != value:
                found.append(Mismatch(step, "weights_hash", hashes[step], value))
        return [*remade], sorted(found, key=lambda mismatch: mismatch.step)


@contextmanager
def replayed(
    run_dir: Path, step: int, overrides: Sequence[str] = (), start: Path | None = None
) -> Iterator[Replayed]:
    """Build the run in `run_dir` in these processes, and rerun its steps up to `step` - 1.

    Nothing in `run_dir` is changed, except for a temporary folder in `run_dir`/replay. The run may still be
    training. Evaluations are not repeated: the schedule gets their recorded metrics.

    Args:
        overrides: settings to change, in the syntax of the command line.
        start: the checkpoint to start from; None: the newest before `step`, or the initial weights.

    Raises:
        UserError: the run, or a checkpoint before `step`, does not exist; the step can't be repeated on this
            number of processes; or an override is invalid.
        NonFiniteError: a loss or gradient before `step` is NaN or Inf.
    """
    config = saved_settings(run_dir, overrides, trains=True)
    attempt = attempt_of(run_dir, step)
    _check(config, run_dir, step, attempt)
    with process_group(config.distributed) as ranks, terminal(ranks, sys.stderr):
        shared = {name: value for name, value in flatten(config).items() if name != "distributed.rank"}
        compare_across_ranks({**shared, "the step": step}, ranks)
        checkpoint = start or on_main(lambda: checkpoint_before(run_dir, step), ranks)
        if attempt is not None:  # sums of another number of threads round differently
            torch.set_num_threads(int(attempt.environment["threads"]))
        folder = on_main(lambda: _temporary_folder(run_dir), ranks)
        try:
            log.setLevel(logging.WARNING)  # the settings that `_settings` changes are not of interest
            run = assemble(_settings(config, folder, checkpoint), secrets.token_hex(8), ranks, StopRequest())
            norms = ParameterNorms(run, step - 1)
            report = run.report._replace(weight_statistics=norms)
            run = replace(run, data=run.data._replace(eval_loader=None), report=report)
            if step > run.plan.total_steps:
                raise UserError(f"--step {step}: the last step of this run is {run.plan.total_steps}")
            if step <= run.plan.steps_before:
                raise UserError(f"{checkpoint} already contains step {step}; pass an earlier checkpoint")
            run.report.run_log.open()
            run.model.train()
            evaluations = on_main(lambda: _evaluations(run_dir), ranks)
            replay = Replayed(Epochs(run), run_dir, step, attempt, checkpoint, norms, evaluations)
            with gathering(why_no_gather(run)):
                replay.use_evaluation()
                while run.state.progress.step < step - 1:
                    replay.epochs.step()
                    replay.use_evaluation()
                yield replay
            run.vote.close()
            run.strategy.close()
            run.report.run_log.close()
        finally:
            if ranks.is_main:
                shutil.rmtree(folder, ignore_errors=True)
                with suppress(OSError):  # it contains reports
                    folder.parent.rmdir()


def _check(config: Config, run_dir: Path, step: int, attempt: RunAttempt | None) -> None:
    world_size = rank_info(config.distributed).world_size
    if attempt is None or config.train.exact is not None or world_size == attempt.world_size:
        return
    number = attempt.world_size
    start = f"torchrun --standalone --nproc_per_node={number}" if number > 1 else "python"
    raise UserError(
        f"step {step} of {run_dir} was run by {number} processes, but this command has {world_size}, and "
        f"rounding depends on that number; run {start} -m trainer.replay {run_dir} --step {step}"
    )


def _settings(config: Config, folder: Path, checkpoint: Path | None) -> Config:
    """Return the settings of the run without loggers, saves and anything that may end it early."""
    train = replace(config.train, log_every_steps=None, histograms_every=None, profile=None)
    train = replace(train, max_hours=None, early_stopping=None)
    saves = replace(config.checkpoint, remote=None, on_failure=False, keep_best=None)
    resume = None if checkpoint is None else str(checkpoint)
    return replace(config, run_dir=str(folder), resume=resume, logger={}, train=train, checkpoint=saves)


def checkpoint_before(run_dir: Path, step: int) -> Path | None:
    """Return the run's newest checkpoint before `step`, or the checkpoint from which the run started."""
    attempts, own = read_attempts(run_dir), Listing(run_dir / "checkpoints", run_id_of(run_dir)).own()
    steps = {
        manifest.step: path
        for path, manifest in reversed(own.items())  # the newest one last
        if manifest.step < step
        and not any(each.first_step < manifest.step and each.started > manifest.saved_at for each in attempts)
    }
    if steps or not attempts or attempts[0].first_step == 0:
        return steps[max(steps)] if steps else None
    start = attempts[0].start
    if start is None or not (Path(start) / "manifest.json").is_file():
        raise UserError(
            f"{run_dir} has no checkpoint before step {step}, and the checkpoint from which it started, "
            f"{start}, does not exist on this machine; copy it there, or run python -m trainer.replay with "
            "--from"
        )
    return Path(start)


def _temporary_folder(run_dir: Path) -> Path:
    """Return a new folder in `run_dir`, which all hosts can read, or elsewhere if `run_dir` is read-only."""
    with suppress(OSError):
        (run_dir / "replay").mkdir(exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".", dir=run_dir / "replay"))
    return Path(tempfile.mkdtemp(prefix="trainer-replay-"))


def _evaluations(run_dir: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for name, values in read_metrics(run_dir).items():
        if name.startswith("eval/"):
            for step, value in values.items():
                found.setdefault(step, {})[name] = value
    return found
