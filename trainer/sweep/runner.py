"""Runs a sweep: starts trials while there is room, and records how each ends, until none is left."""

import signal
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.config import Config
from trainer.config.overrides import set_to
from trainer.errors import NonFiniteError, StoppedBySignal, UserError
from trainer.files.untrusted import printable
from trainer.launch import fresh
from trainer.launch.signals import stop_signals_to
from trainer.sweep import results, trials
from trainer.sweep.devices import room, visible_gpus
from trainer.sweep.runs import Run, shown
from trainer.sweep.search import REFUSALS, Combination, reason
from trainer.sweep.settings import SweepConfig
from trainer.sweep.trials import Trial, TrialLog

OUTPUT = "output.log"
_POLL_S = 0.05
_STOPPED, _NOT_FINITE = StoppedBySignal.exit_code, NonFiniteError.exit_code
_STATES = {
    0: trials.DONE,
    UserError.exit_code: trials.MISTAKEN,
    _NOT_FINITE: trials.FAILED,
    _STOPPED: trials.STOPPED,
}


@dataclass
class Attempt:
    """A trial to be run; after its start also how it runs."""

    trial: Trial
    config: Config
    process: subprocess.Popen[bytes] = field(init=False)
    gpus: list[str] = field(init=False)
    began_s: float = field(init=False)  # time.monotonic


class Runner:
    """Starts the trials of a sweep, and follows each to its end.

    Args:
        search: the combinations. None is taken in advance, as a search learns from each result.
        options: Hydra's own options, for the command line of each trial.
        compose: returns the validated settings of a combination.
    """

    def __init__(
        self,
        settings: SweepConfig,
        search: Iterator[Combination],
        log: TrialLog,
        options: Sequence[str],
        compose: Callable[[Combination], Config],
    ) -> None:
        self._settings, self._search, self._log = settings, search, log
        self._options, self._compose = list(options), compose
        self._gpus = visible_gpus()
        self._queue: deque[Attempt] = deque()
        self._running: list[Attempt] = []
        self._signals: list[int] = []
        self._ends = False  # no trial is started any more
        self._mistake: str | None = None

    def run(self) -> int:
        """Run the rest of the sweep, report on all of it, and return the exit status.

        Raises:
            UserError: the settings of a trial are wrong; the other trials have saved.
        """
        before = ", ".join(f"{count} {state}" for state, count in self._num_in_state().items())
        _say(f"sweep in {self._log.folder}" + (f": {before} before" if before else ""))
        try:
            with stop_signals_to(self._signals.append):
                self._loop()
        finally:
            for attempt in self._running:  # after an internal error: leave no process behind
                attempt.process.kill()
                attempt.process.wait()
        results.write(self._log, self._settings)
        states = self._num_in_state()
        if self._mistake is not None:
            raise UserError(f"{self._mistake}; the sweep ends here; the same command continues it")
        if trials.STOPPED in states:
            _say("stopped and saved; the same command continues the sweep")
            return _STOPPED
        return 1 if trials.DIED in states else _NOT_FINITE if trials.FAILED in states else 0

    def _num_in_state(self) -> Counter[str]:
        return Counter(trial.state for trial in self._log.trials.values())

    def _loop(self) -> None:
        while True:
            while self._has_room() and (attempt := self._next()) is not None:
                if (gpus := self._room(attempt)) is None:
                    break
                self._queue.popleft()
                self._start(attempt, gpus)
            if not self._running:
                return
            for attempt in [*self._running]:
                if (code := attempt.process.poll()) is not None:
                    self._ended(attempt, code)
            while self._signals:
                self._signals.pop()
                if not self._ends:
                    _say(f"running trials ({len(self._running)}) save and stop; a second signal kills them")
                    self._end()
                else:
                    for attempt in self._running:
                        attempt.process.kill()
            time.sleep(_POLL_S)

    def _has_room(self) -> bool:
        """Whether the search should be asked: there is room for one more like the last one."""
        return not self._ends and (not self._running or self._room(self._running[-1]) is not None)

    def _room(self, attempt: Attempt) -> list[str] | None:
        taken = [running.gpus for running in self._running]
        return room(attempt.config, self._settings.concurrent, self._gpus, taken)

    def _next(self) -> Attempt | None:
        """The head of the queue, perhaps from a new combination; None if there are no more."""
        while not self._queue and (combination := next(self._search, None)) is not None:
            try:
                self._plan(combination)
            except REFUSALS as error:
                words = f"{' '.join(combination)}: {reason(error)}"
                if self._settings.search == "grid":  # it was valid when the sweep began
                    self._end(f"the settings changed during the sweep: {words}")
                    return None
                _say(f"left out: {words}")
        return self._queue[0] if self._queue else None

    def _plan(self, combination: Combination) -> None:
        """Queue the runs of a combination, one for each seed, that are not final and do not run already."""
        config = self._compose(combination)
        repeated = self._settings.seeds > 1
        for seed in range(config.seed or 0, (config.seed or 0) + self._settings.seeds):
            trial = self._log.trial(combination, seed if repeated else config.seed, repeated=repeated)
            if trial.state not in (*trials.FINAL, trials.RUNNING):
                self._queue.append(Attempt(trial, config))

    def _start(self, attempt: Attempt, gpus: list[str]) -> None:
        trial, folder = attempt.trial, self._log.folder / attempt.trial.folder
        folder.mkdir(exist_ok=True)
        argv = [*self._options, *trial.overrides, set_to("run_dir", str(folder))]
        begun = any(folder.glob("checkpoints/step_*"))
        if begun or (attempt.config.resume is None and (folder / "run.json").exists()):
            argv.append("resume=auto")
        trial.state, trial.status = trials.RUNNING, None
        self._log.write(trial)
        with (folder / OUTPUT).open("ab") as output:
            attempt.process = fresh.start(
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
        metric, metrics = self._settings.metric, Run(folder).metrics
        trial.value = metrics.get(metric)
        self._log.write(trial)
        words = f"{trial.folder} {trial.state}"
        if trial.state == trials.DONE:
            words += f": {metric} {shown(trial.value) or 'none'}, {trial.seconds:.0f} s"
        elif trial.state != trials.STOPPED:
            words += f" (status {code}): {_last_line(folder / OUTPUT)}"
        _say(words)
        if trial.state == trials.MISTAKEN:
            self._end(f"a mistake in {words}")
        elif trial.state == trials.DONE and trial.value is None and self._settings.search != "grid":
            self._end(f"hydra.sweeper.metric is {metric}, but trials have {', '.join(metrics)}")

    def _end(self, mistake: str | None = None) -> None:
        """Start no more trials; those that run save and stop."""
        self._mistake = self._mistake or mistake
        if not self._ends:
            self._ends = True
            for attempt in self._running:  # the run, or its launcher, which passes it on
                attempt.process.send_signal(signal.SIGTERM)


def _say(text: str) -> None:
    print(text, flush=True)


def _last_line(output: Path) -> str:
    lines = output.read_text(errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    return f"{printable(last)}  ({output})"
