"""Runs a sweep: starts trials while there is room, and records how each ends, until none is left."""

import signal
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from trainer.config import Config
from trainer.config.overrides import in_words, set_to
from trainer.errors import NonFiniteError, StoppedBySignal, UserError
from trainer.files.untrusted import printable
from trainer.launch import fresh
from trainer.launch.signals import stop_signals_to
from trainer.sweep import report, trials
from trainer.sweep.devices import Slots, visible_gpus
from trainer.sweep.search import GridSearch, Proposal, Search
from trainer.sweep.settings import SweepConfig
from trainer.sweep.trials import Trial, TrialLog, mean, metrics_of

OUTPUT = "output.log"
_POLL_S = 0.05
_RETRIES, _REFUSED_IN_A_ROW = 2, 50
_REFUSALS = (UserError, HydraException, OmegaConfBaseException)
_MISTAKE, _NOT_FINITE, _STOPPED = (e.exit_code for e in (UserError, NonFiniteError, StoppedBySignal))


@dataclass
class Planned:
    """A trial to be run."""

    trial: Trial
    config: Config
    num_deaths: int = 0


@dataclass
class Running:
    planned: Planned
    process: subprocess.Popen[bytes]
    gpus: list[str]
    began_s: float  # time.monotonic


class Runner:
    """Starts the trials of a sweep, and follows each to its end.

    Asks the search for no combination in advance, as it learns from each result.

    Args:
        options: Hydra's own options, for the command line of each trial.
        compose: returns the validated settings of a trial with these overrides.
    """

    def __init__(
        self,
        settings: SweepConfig,
        search: Search,
        log: TrialLog,
        options: Sequence[str],
        compose: Callable[[Sequence[str]], Config],
    ) -> None:
        self._settings, self._search, self._log = settings, search, log
        self._options, self._compose = list(options), compose
        self._slots = Slots(settings.concurrent, visible_gpus())
        self._queue: deque[Planned] = deque()
        self._running: list[Running] = []
        self._open: dict[Proposal, list[Trial]] = {}  # the search does not know their results yet
        self._signals: list[int] = []
        self._full = False  # no room for another trial
        self._ends = False  # no trial is started any more
        self._mistake: str | None = None

    def run(self) -> int:
        """Run the rest of the sweep, report on all of it, and return the exit status.

        Raises:
            UserError: the settings of all trials or of one are wrong; the other trials have saved.
        """
        if isinstance(self._search, GridSearch):
            self._leave_out_contradictions(self._search)
        known = Counter(trial.state for trial in self._log.trials.values())
        before = ", ".join(f"{count} {state}" for state, count in known.items())
        _say(f"sweep in {self._log.folder}" + (f": {before} before" if before else ""))
        try:
            with stop_signals_to(self._signals.append):
                self._loop()
        finally:
            for running in self._running:  # after an internal error: leave no process behind
                running.process.kill()
                running.process.wait()
        report.write(self._log, self._settings)
        states = {trial.state for trial in self._log.trials.values()}
        if self._mistake is not None:
            raise UserError(f"{self._mistake}; the sweep ends here; the same command continues it")
        if trials.STOPPED in states or trials.RUNNING in states:
            _say("stopped and saved; the same command continues the sweep")
            return _STOPPED
        return 1 if trials.DIED in states else _NOT_FINITE if trials.FAILED in states else 0

    def _loop(self) -> None:
        num_signals = 0
        while True:
            while not self._ends and not self._full and (planned := self._next()) is not None:
                if (gpus := self._slots.free(planned.config)) is not None:
                    self._queue.popleft()
                    self._slots.take(gpus)
                    self._start(planned, gpus)
                self._full = self._slots.free(planned.config) is None
            for running in list(self._running):
                if (code := running.process.poll()) is not None:
                    self._ended(running, code)
            if not self._running and (self._ends or self._next() is None):
                return
            if len(self._signals) > num_signals:
                num_signals = len(self._signals)
                if not self._ends:
                    _say(f"running trials ({len(self._running)}) save and stop; a second signal kills them")
                    self._end()
                else:
                    for running in self._running:
                        running.process.kill()
            time.sleep(_POLL_S)

    def _leave_out_contradictions(self, search: GridSearch) -> None:
        """Leave out combinations that contradict.

        Raises:
            UserError: a value fits no combination.
        """
        refused: list[tuple[tuple[str, ...], str]] = []
        good: set[str] = set()
        for combination in search.combinations:
            try:
                self._compose(self._log.overrides(combination))
                good.update(combination)
            except _REFUSALS as error:
                refused.append((combination, _words(error)))
        for combination, message in refused:
            if not good.issuperset(combination) or not combination:
                raise UserError(message)
            _say(f"left out: {' '.join(combination)}: {message}")
            search.combinations.remove(combination)

    def _next(self) -> Planned | None:
        """The trial at the head of the queue, perhaps from a new combination; None if there are no more."""
        num_refused = 0
        while not self._queue and (proposal := self._search.ask()) is not None:
            try:
                self._plan(proposal)
            except _REFUSALS as error:
                words = f"{' '.join(proposal.overrides)}: {_words(error)}"
                self._search.tell(proposal, None)
                num_refused += 1
                if isinstance(self._search, GridSearch):  # it was valid when the sweep began
                    self._end(f"the settings changed during the sweep: {words}")
                    return None
                _say(f"left out: {words}")
                if num_refused == _REFUSED_IN_A_ROW:
                    self._end(f"{num_refused} trials in a row cannot be run, the last one: {words}")
                    return None
        return self._queue[0] if self._queue else None

    def _plan(self, proposal: Proposal) -> None:
        """Queue the runs of a combination that are not final."""
        config = self._compose(self._log.overrides(proposal.overrides))
        first, repeated = config.seed, self._settings.seeds > 1
        seeds = [(first or 0) + n for n in range(self._settings.seeds)] if repeated else [first]
        self._open[proposal] = wanted = [
            self._log.trial(proposal.overrides, seed, repeated=repeated) for seed in seeds
        ]
        alive = self._alive()
        for trial in wanted:
            if trial.state not in trials.FINAL and trial.number not in alive:
                self._queue.append(Planned(trial, config))
        self._tell()

    def _alive(self) -> set[int]:
        planned = [*self._queue, *(running.planned for running in self._running)]
        return {one.trial.number for one in planned}

    def _tell(self) -> None:
        """Tell the search of each combination whose runs have all ended; a stopped one will be resumed."""
        alive = self._alive()
        for proposal, runs in list(self._open.items()):
            over = {*trials.FINAL, trials.DIED}
            if all(run.state in over and run.number not in alive for run in runs):
                self._search.tell(proposal, mean(runs))
                del self._open[proposal]

    def _start(self, planned: Planned, gpus: list[str]) -> None:
        trial, folder = planned.trial, self._log.folder / planned.trial.folder
        folder.mkdir(exist_ok=True)
        argv = [*self._options, *trial.overrides, set_to("run_dir", str(folder))]
        begun = any(folder.glob("checkpoints/step_*"))
        if begun or (planned.config.resume is None and (folder / "run.json").exists()):
            argv.append("resume=auto")
        trial.state, trial.status = trials.RUNNING, None
        self._log.write(trial)
        with (folder / OUTPUT).open("ab") as output:
            process = fresh.start(
                argv,
                devices=gpus or None,
                # Hydra sets it to 1 in this process: a trial would end with a traceback, not its status.
                environment={"HYDRA_FULL_ERROR": "0"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._running.append(Running(planned, process, gpus, time.monotonic()))

    def _ended(self, running: Running, code: int) -> None:
        trial, metric = running.planned.trial, self._settings.metric
        folder = self._log.folder / trial.folder
        self._running.remove(running)
        self._slots.give_back(running.gpus)
        self._full = False
        trial.status, trial.seconds = code, trial.seconds + round(time.monotonic() - running.began_s, 3)
        trial.state = self._state(code)
        metrics = metrics_of(folder)
        trial.value = metrics.get(metric)
        self._log.write(trial)
        words = f"{trial.folder} {trial.state}"
        if trial.state == trials.DONE:
            value = "none" if trial.value is None else f"{trial.value:.6g}"
            words += f": {metric} {value}, {trial.seconds:.0f} s"
        elif trial.state != trials.STOPPED:
            words += f" (status {code}): {_last_line(folder / OUTPUT)}"
        again = trial.state == trials.DIED and not self._ends and running.planned.num_deaths < _RETRIES
        if again:
            running.planned.num_deaths += 1
            self._queue.appendleft(running.planned)
            words += f"; it is restarted, {running.planned.num_deaths} of {_RETRIES}"
        _say(f"{words}{self._progress()}")
        if trial.state == trials.MISTAKEN:
            self._end(f"a mistake in {words}")
        elif trial.state == trials.DONE and trial.value is None and self._settings.search != "grid":
            self._end(f"hydra.sweeper.metric is {metric}, but trials have {', '.join(metrics)}")
        self._tell()

    def _state(self, code: int) -> str:
        """The state of a trial that ended with `code`."""
        by_code = {0: trials.DONE, _MISTAKE: trials.MISTAKEN, _NOT_FINITE: trials.FAILED}
        stopped = code == _STOPPED or self._ends
        return by_code.get(code, trials.STOPPED if stopped else trials.DIED)

    def _progress(self) -> str:
        """How far the sweep is, and the best trial so far."""
        known = self._log.trials.values()
        num_over = sum(trial.state in (*trials.FINAL, trials.DIED) for trial in known)
        num_left = len(self._running) + len(self._queue) + self._search.num_left() * self._settings.seeds
        words = f"  [{num_over} of {num_over + num_left}"
        values = {
            trial.value: trial.folder
            for trial in known
            if trial.state == trials.DONE and trial.value is not None
        }
        if values:
            best = min(values, key=lambda value: self._settings.sign * value)
            words += f", best {self._settings.metric} {best:.6g} ({values[best]})"
        return f"{words}]"

    def _end(self, mistake: str | None = None) -> None:
        """Start no more trials; those that run save and stop."""
        self._mistake = self._mistake or mistake
        if not self._ends:
            self._ends = True
            for running in self._running:  # the run, or its launcher, which passes it on
                running.process.send_signal(signal.SIGTERM)


def _say(text: str) -> None:
    print(text, flush=True)


def _words(error: Exception) -> str:
    return in_words(error) if isinstance(error, HydraException | OmegaConfBaseException) else str(error)


def _last_line(output: Path) -> str:
    lines = output.read_text(errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    return f"{printable(last)}  ({output})"
