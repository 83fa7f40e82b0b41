"""Runs a sweep: starts trials while there is room, and records how each ends, until none is left."""

import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.config.overrides import set_to
from trainer.errors import NonFiniteError, StoppedBySignal, UserError
from trainer.files.untrusted import printable
from trainer.launch import fresh
from trainer.launch.signals import stop_signals_to
from trainer.run_dir.metrics_file import read_metrics
from trainer.sweep import results, trial_log
from trainer.sweep.devices import Slots, visible_gpus
from trainer.sweep.progress import ProgressLine
from trainer.sweep.search import GridSearch, Search
from trainer.sweep.settings import SweepConfig
from trainer.sweep.trial_log import TrialLog
from trainer.sweep.trial_queue import Compose, Planned, TrialQueue

OUTPUT = "output.log"
_POLL_S, _LOOK_S = 0.05, 1.0
_RETRIES = 2
_MISTAKE, _NOT_FINITE, _STOPPED = (e.exit_code for e in (UserError, NonFiniteError, StoppedBySignal))


@dataclass
class Running:
    planned: Planned
    process: subprocess.Popen[bytes]
    gpus: list[str]
    folder: Path
    began_s: float  # time.monotonic
    looked_s: float
    stop_reason: str | None = None  # stop, prune or hang, once it was asked to
    reported: set[int] = field(default_factory=set)  # steps


class Runner:
    """Starts the trials of a sweep, and follows each to its end.

    Args:
        common, compose: as for `TrialQueue`.
        options: Hydra's own options, for the command line of each trial.
    """

    def __init__(
        self,
        settings: SweepConfig,
        search: Search,
        folder: Path,
        common: Sequence[str],
        options: Sequence[str],
        compose: Compose,
    ) -> None:
        self._settings, self._search, self._folder = settings, search, folder
        self._options = list(options)
        self._trial_log = TrialLog(folder)
        self._slots = Slots(settings.concurrent, visible_gpus())
        self._running: list[Running] = []
        self._deaths: Counter[int] = Counter()
        self._full = False  # no room for another trial
        self._received: list[int] = []
        self._handled = 0
        self._end_by_s: float | None = None  # set: the sweep ends, and its trials save
        self._mistake: str | None = None
        self._progress = ProgressLine(settings, search, self._trial_log)
        self._queue = TrialQueue(settings, search, self._trial_log, common, compose, self._progress.say)

    def run(self) -> int:
        """Run the rest of the sweep, report on all of it, and return the exit status.

        Raises:
            UserError: the settings of all trials or of one are wrong; the other trials have saved.
        """
        if isinstance(self._search, GridSearch):
            self._queue.leave_out_contradictions(self._search)
        known = Counter(trial.state for trial in self._trial_log.trials.values())
        before = ", ".join(f"{count} {state}" for state, count in known.items())
        self._progress.say(f"sweep in {self._folder}" + (f": {before} before" if before else ""))
        try:
            with stop_signals_to(self._received.append):
                self._loop()
        finally:
            for running in self._running:  # after an internal error: leave no process behind
                running.process.kill()
                running.process.wait()
            self._progress.end()
        results.write(self._folder, self._settings, self._search.by_log)
        states = {trial.state for trial in self._trial_log.trials.values()}
        if self._mistake is not None:
            raise UserError(f"{self._mistake}; the sweep ends here; the same command continues it")
        if trial_log.STOPPED in states or trial_log.RUNNING in states:
            self._progress.say("stopped and saved; the same command continues the sweep")
            return _STOPPED
        return 1 if trial_log.DIED in states else _NOT_FINITE if trial_log.FAILED in states else 0

    def _loop(self) -> None:
        while True:
            self._fill()
            for running in list(self._running):
                self._look_at(running)
            self._handle_signals()
            if not self._running and (self._end_by_s is not None or self._next() is None):
                return
            self._progress.show(len(self._running), len(self._queue))
            time.sleep(_POLL_S)

    def _fill(self) -> None:
        """Start trials while there is room. Asks for none in advance: the search learns from each result."""
        while not self._full and self._end_by_s is None and (planned := self._next()) is not None:
            gpus = self._slots.take(planned.config)
            if gpus is None:
                self._full = True
                return
            self._queue.started()
            self._start(planned, gpus)
            self._full = not self._slots.has_room(planned.config)

    def _next(self) -> Planned | None:
        try:
            return self._queue.next()
        except UserError as error:
            self._end(str(error))
            return None

    def _start(self, planned: Planned, gpus: list[str]) -> None:
        trial, folder = planned.trial, self._folder / planned.trial.folder
        folder.mkdir(exist_ok=True)
        argv = [*self._options, *trial.overrides, set_to("run_dir", str(folder))]
        begun = any(folder.glob("checkpoints/step_*"))
        if begun or (planned.config.resume is None and (folder / "run.json").exists()):
            argv.append("resume=auto")
        trial.state, trial.status = trial_log.RUNNING, None
        self._trial_log.write(trial)
        with (folder / OUTPUT).open("ab") as output:
            process = fresh.start(
                argv,
                devices=gpus or None,
                # Hydra sets it to 1 in this process: a trial would end with a traceback, not its status.
                environment={"HYDRA_FULL_ERROR": "0"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        now = time.monotonic()
        self._running.append(Running(planned, process, gpus, folder, now, now))

    def _look_at(self, running: Running) -> None:
        code, now = running.process.poll(), time.monotonic()
        if code is not None:
            self._ended(running, code)
        elif now - running.looked_s >= _LOOK_S:
            running.looked_s = now
            if running.stop_reason is None and self._settings.prune and self._is_worse(running):
                self._request_stop(running, "prune")
            silent_s = min(now - running.began_s, _silent_s(running.folder))
            in_queue = running.planned.config.launch.in_cluster
            if silent_s > self._settings.silent_s and not in_queue and running.stop_reason != "hang":
                self._progress.say(
                    f"{running.planned.trial.folder} has written nothing for {silent_s:.0f} s and is "
                    f"killed: hydra.sweeper.silent_s={self._settings.silent_s:g}"
                )
                running.stop_reason = "hang"
                running.process.kill()  # its ranks end with it

    def _is_worse(self, running: Running) -> bool:
        worse = False
        for step, value in read_metrics(running.folder).get(self._settings.metric, {}).items():
            if step not in running.reported:
                running.reported.add(step)
                worse = running.planned.proposal.report(value, step)
        return worse

    def _ended(self, running: Running, code: int) -> None:
        trial = running.planned.trial
        self._running.remove(running)
        self._slots.give_back(running.gpus)
        self._full = False
        trial.status, trial.seconds = code, trial.seconds + round(time.monotonic() - running.began_s, 3)
        trial.state = _state(code, running.stop_reason)
        if self._settings.prune:
            self._is_worse(running)  # report its last metrics, for comparison
        trial.value = results.value_of(running.folder, self._settings.metric)
        self._trial_log.write(trial)
        words = f"{trial.folder} {trial.state}"
        if trial.state == trial_log.DONE:
            value = "none" if trial.value is None else f"{trial.value:.6g}"
            self._progress.say(f"{words}: {self._settings.metric} {value}, {trial.seconds:.0f} s")
        elif trial.state in (trial_log.DIED, trial_log.FAILED, trial_log.MISTAKEN):
            words += f" (status {code}): {_last_lines(running.folder)}"
            self._progress.say(words)
        else:
            self._progress.say(words)
        if trial.state == trial_log.MISTAKEN:
            self._end(f"a mistake in {words}")
        elif trial.state == trial_log.DONE and trial.value is None and self._settings.search != "grid":
            metrics = ", ".join(results.metrics_of(running.folder))
            self._end(f"hydra.sweeper.metric is {self._settings.metric}, but trials have {metrics}")
        elif (
            trial.state == trial_log.DIED and self._end_by_s is None and self._deaths[trial.number] < _RETRIES
        ):
            self._deaths[trial.number] += 1
            self._progress.say(f"{trial.folder} is restarted, {self._deaths[trial.number]} of {_RETRIES}")
            self._queue.again(running.planned)
            return
        self._queue.ended(running.planned)

    def _request_stop(self, running: Running, why: str) -> None:
        running.stop_reason = why
        running.process.send_signal(signal.SIGTERM)  # to the run, or its launcher, which passes it on

    def _end(self, mistake: str | None = None) -> None:
        self._mistake = self._mistake or mistake
        if self._end_by_s is None:
            self._end_by_s = time.monotonic() + self._settings.stop_timeout_s
            for running in self._running:
                self._request_stop(running, "stop")

    def _handle_signals(self) -> None:
        """Act on signals: the first stops, a second does not wait for trials to save."""
        late = self._end_by_s is not None and time.monotonic() > self._end_by_s
        if len(self._received) > self._handled:
            late = late or self._handled > 0
            self._handled = len(self._received)
            if self._end_by_s is None and self._running:
                self._progress.say(
                    f"running trials ({len(self._running)}) save and stop; a second signal kills them"
                )
            self._end()
        if late:
            for running in self._running:
                self._progress.say(f"{running.planned.trial.folder} has not saved in time and is killed")
                running.process.kill()
                running.process.wait()


def _state(code: int, stop_reason: str | None) -> str:
    """The state of a trial that ended with `code`, given why it was asked to stop."""
    by_code = {0: trial_log.DONE, _MISTAKE: trial_log.MISTAKEN, _NOT_FINITE: trial_log.FAILED}
    if code in by_code:
        return by_code[code]
    if stop_reason == "prune":
        return trial_log.PRUNED
    return trial_log.STOPPED if code == _STOPPED or stop_reason == "stop" else trial_log.DIED


def _silent_s(folder: Path) -> float:
    """Seconds since the run last wrote its logs or metrics."""
    written = [path.stat().st_mtime for path in folder.glob("*.log*")]
    written += [path.stat().st_mtime for path in folder.glob("metrics.jsonl")]
    return time.time() - max(written, default=time.time())


def _last_lines(folder: Path) -> str:
    lines = (folder / OUTPUT).read_text(errors="replace").splitlines() if (folder / OUTPUT).exists() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    return f"{printable(last)}  ({folder / OUTPUT})"
