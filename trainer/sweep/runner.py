"""Run a sweep: start trials while there is room, and record how each trial ends."""

import math
import os
import signal
import subprocess
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.config import Config, LocalLaunchConfig
from trainer.config.overrides import set_to
from trainer.errors import NonFiniteError, StoppedBySignal, UserError, first_line
from trainer.files import failure_file
from trainer.files.columns import cell
from trainer.files.untrusted import printable
from trainer.launch import new_process
from trainer.launch.signals import stop_signals_to
from trainer.sweep import results, trials
from trainer.sweep.pruning import Pruning
from trainer.sweep.search import SweepConfig, say
from trainer.sweep.trials import Combination, RunFiles, Trial, TrialLog, words_of

OUTPUT = "output.log"
_POLL_S = 0.05
_EVALUATIONS_EVERY_S = 0.5  # how often the files of running trials are read, for pruning
# The number of trials that must end with the same message before the sweep blames a shared setting.
_MIN_SAME_MESSAGES = 3
# How many jobs of a sweep are queued at a time, to leave room for others; SLURM queues them anyway.
_QUEUED_JOBS = 16
_MISTAKE, _STOPPED, _NOT_FINITE = (end.exit_code for end in (UserError, StoppedBySignal, NonFiniteError))
_STATES = {0: trials.DONE, _MISTAKE: trials.INVALID, _NOT_FINITE: trials.FAILED, _STOPPED: trials.STOPPED}


@dataclass
class Attempt:
    """One start of a trial; the fields without a default are set when it starts."""

    trial: Trial
    config: Config
    process: subprocess.Popen[bytes] = field(init=False)
    gpus: list[str] = field(init=False)
    began_s: float = field(init=False)  # time.monotonic
    failed_before: int | None = field(init=False)  # when failure.json was last written before the start


class Runner:
    """Starts the trials of a sweep, and follows each to its end.

    Args:
        search: an iterator of combinations, each with its config or an error message; advanced when a trial
            can start.
        options: Hydra's own options, for the command line of each trial.
    """

    def __init__(
        self,
        wanted: SweepConfig,
        search: Iterator[tuple[Combination, Config | str]],
        log: TrialLog,
        options: Sequence[str],
        pruning: Pruning | None = None,
    ) -> None:
        self._wanted, self._search, self._log, self._options = wanted, search, log, options
        self._pruning, self._read_at_s = pruning, -math.inf
        self._learns = pruning is not None or wanted.search != "grid"  # from the metric of each trial
        self._gpus = visible_gpus()
        self._trials: list[Trial] = []  # of this command; the log may also have trials of other commands
        self._queue: deque[Attempt] = deque()
        self._running: list[Attempt] = []
        self._signals: list[int] = []
        self._ends = False  # no further trial is started
        self._mistake: str | None = None

    def run(self) -> int:
        """Run the rest of the sweep, report all trials, and return the exit status."""
        counts = Counter(trial.state for trial in self._log.trials.values())
        before = ", ".join(f"{count} {state}" for state, count in counts.items())
        say(f"sweep in {self._log.folder}" + (f"; earlier trials: {before}" if before else ""))
        with stop_signals_to(self._signals.append):
            self._loop()
        say(results.write(self._log, self._wanted))
        if self._mistake is not None:
            raise UserError(
                f"{self._mistake}. The sweep has stopped. Correct the mistake, and repeat the command to "
                "continue the sweep"
            )
        invalid = [trial for trial in self._trials if trial.state == trials.INVALID]
        if invalid:
            say(f"{len(invalid)} of {len(self._trials)} trials are invalid; to retry one, delete its folder")
        for trial in invalid:
            say(f"  {' '.join(words_of(trial.swept))}: {trial.reason}")
        states = {trial.state for trial in self._trials}
        if self._ends or trials.STOPPED in states:
            say("stopped and saved; the same command continues the sweep")
            return _STOPPED
        by_state = {trials.DIED: 1, trials.INVALID: _MISTAKE, trials.FAILED: _NOT_FINITE}
        return next((status for state, status in by_state.items() if state in states), 0)

    def _loop(self) -> None:
        while True:
            while not self._ends and self._start_next():
                pass
            if not self._running:
                return
            for attempt in [*self._running]:
                if (code := attempt.process.poll()) is not None:
                    self._ended(attempt, code)
            self._prune()
            while self._signals:
                self._signals.pop()
                if not self._ends:
                    say(f"running trials ({len(self._running)}) save and stop; a second signal kills them")
                    self._end()
                else:
                    for attempt in self._running:
                        attempt.process.kill()
            time.sleep(_POLL_S)

    def _start_next(self) -> bool:
        """Start a trial, if there is one and room for it; return whether a trial was started.

        The search is advanced only if there is room for a trial like the last, so that it knows as many
        results as possible.
        """
        if self._running and self._room(self._running[-1]) is None:
            return False
        while not self._queue:
            if (found := next(self._search, None)) is None:
                return False
            self._queue.extend(self._pending_trials(*found))
        if (gpus := self._room(self._queue[0])) is None:
            return False
        self._start(self._queue.popleft(), gpus)
        return True

    def _room(self, attempt: Attempt) -> list[str] | None:
        taken = [each.gpus for each in self._running]
        return room(attempt.config, self._wanted.concurrent, self._gpus, taken)

    def _pending_trials(self, combination: Combination, config: Config | str) -> Iterator[Attempt]:
        if isinstance(config, str):
            trial = self._log.trial(combination)
            self._trials.append(trial)
            if not self._log.is_final(trial):
                trial.state, trial.reason = trials.INVALID, config
                self._log.write()
            return
        first, seeds = config.seed or 0, self._wanted.seeds
        for seed in range(first, first + seeds):
            trial = self._log.trial({**combination, "seed": str(seed)} if seeds > 1 else combination)
            self._trials.append(trial)
            if trial.state != trials.RUNNING and not self._log.is_final(trial):
                yield Attempt(trial, config)

    def _start(self, attempt: Attempt, gpus: list[str]) -> None:
        trial, folder = attempt.trial, self._log.folder / attempt.trial.folder
        folder.mkdir(exist_ok=True)
        argv = [*self._options, *trial.overrides, set_to("run_dir", str(folder))]
        begun = any(folder.glob("checkpoints/step_*"))
        # With a folder slurm/, its job may still be running or queued.
        used = (folder / "run.json").exists() or (folder / "slurm").exists()
        if begun or (attempt.config.resume is None and used):
            argv.append("resume=auto")
        trial.state, trial.status, trial.reason, trial.pruned_at = trials.RUNNING, None, None, None
        self._log.write()
        attempt.failed_before = failure_file.written_at(folder)
        with (folder / OUTPUT).open("ab") as output:
            attempt.process = new_process.start(
                argv,
                devices=gpus or None,
                # Hydra sets it to 1 in this process: a trial would end with a traceback, not its status.
                environment={"HYDRA_FULL_ERROR": "0"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        attempt.gpus, attempt.began_s = gpus, time.monotonic()
        self._running.append(attempt)

    def _ended(self, attempt: Attempt, code: int) -> None:
        trial, folder = attempt.trial, self._log.folder / attempt.trial.folder
        self._running.remove(attempt)
        trial.status, trial.seconds = code, trial.seconds + round(time.monotonic() - attempt.began_s, 3)
        trial.state = _STATES.get(code, trials.STOPPED if self._ends else trials.DIED)
        if trial.state == trials.DONE:
            trial.pruned_at = None  # it reached its end before the signal
        elif trial.pruned_at is not None:
            trial.state = trials.PRUNED
            with (folder / OUTPUT).open("a") as output:
                output.write(f"pruned by the sweep at step {trial.pruned_at}; the sweep does not resume it\n")
        elif trial.state != trials.STOPPED:
            trial.reason = _reason(attempt, folder)
        metric, run = self._wanted.metric, RunFiles(folder)
        metrics = run.metrics
        trial.value = metrics.get(metric)
        self._log.write()
        if self._pruning is not None:
            self._pruning.end(trial)
        words = f"{trial.folder} {results.state(trial)}"
        if trial.state in (trials.DONE, trials.PRUNED):
            words += f": {metric} {cell(trial.value) or 'none'}, {trial.seconds:.0f} s"
        elif trial.reason is not None:
            words += f" (status {code}): {trial.reason}  ({folder / OUTPUT})"
        say(words)
        if trial.state == trials.INVALID and self._all_fail_alike():
            self._end(f"{trial.reason}; all trials so far ended with this message")
        known: Iterable[str] = metrics if self._pruning is None else run.scalars
        if trial.state == trials.DONE and metric not in known and self._learns:
            names = ", ".join(map(printable, known))
            self._end(f"hydra.sweeper.metric is {metric}, but the trials logged only {names}")

    def _all_fail_alike(self) -> bool:
        """Return whether all trials so far ended with the same message, and have no swept value in common."""
        ended = [trial for trial in self._trials if trial.status is not None]
        if len(ended) < _MIN_SAME_MESSAGES or {trial.state for trial in ended} != {trials.INVALID}:
            return False
        values = [{*trial.swept.items()} for trial in ended]
        return len({trial.reason for trial in ended}) == 1 and not set.intersection(*values)

    def _prune(self) -> None:
        """Stop the running trials that the pruner rejects, after they have saved; log each decision first."""
        now_s = time.monotonic()
        if self._pruning is None or self._ends or now_s < self._read_at_s + _EVALUATIONS_EVERY_S:
            return
        self._read_at_s = now_s
        for attempt in self._running:
            trial = attempt.trial
            if trial.pruned_at is None:
                trial.pruned_at = self._pruning.step_to_end_at(trial)
                if trial.pruned_at is not None:
                    self._log.write()
                    attempt.process.send_signal(signal.SIGTERM)

    def _end(self, mistake: str | None = None) -> None:
        self._mistake = self._mistake or mistake
        if not self._ends:
            self._ends = True
            for attempt in self._running:  # the run, or its launcher, which forwards the signal
                attempt.process.send_signal(signal.SIGTERM)


def _reason(attempt: Attempt, folder: Path) -> str:
    """Return the message in failure.json, or else the last line of output that is not indented."""
    if (
        failure_file.written_at(folder) != attempt.failed_before
        and (end := failure_file.read(folder)) is not None
    ):
        return printable(first_line(str(end.get("message"))))
    lines = (folder / OUTPUT).read_text(errors="replace").splitlines()
    last = printable(next((line for line in reversed(lines) if line[:1].strip()), "no output"))
    if (code := attempt.process.returncode) < 0:
        return f"killed by {signal.Signals(-code).name}; the last line of its output is: {last}"
    return last


def room(
    config: Config, concurrent: str, gpus: Sequence[str], taken: Sequence[Sequence[str]]
) -> list[str] | None:
    """Return the GPUs for a trial, [] if it uses none; None if there is no room.

    Args:
        concurrent: the maximum number of running trials; trials may then share GPUs, the least busy first.
            With "auto", each trial gets its own GPUs; without GPUs, one trial runs at a time.
        gpus: the GPUs of this machine.
        taken: the GPUs of each running trial.
    """
    busy = Counter(gpu for some in taken for gpu in some)
    own = sorted(gpus, key=lambda gpu: busy[gpu])[: _num_wanted(config, len(gpus))]
    if concurrent == "auto" and own:
        return None if any(busy[gpu] for gpu in own) else own
    at_most = int(concurrent) if concurrent != "auto" else _QUEUED_JOBS if config.launch.in_cluster else 1
    return own if len(taken) < at_most else None


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name for name in listed.split(",") if name and name != "-1"]
    return [str(index) for index in range(new_process.num_gpus())]


def _num_wanted(config: Config, num_gpus: int) -> int:
    if config.distributed.device == "cpu" or config.launch.in_cluster:
        return 0
    if config.strategy.name == "dp":
        return num_gpus
    if isinstance(config.launch, LocalLaunchConfig):
        return min(config.launch.processes or num_gpus, num_gpus)
    return min(1, num_gpus)
