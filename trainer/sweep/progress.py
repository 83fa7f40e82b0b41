"""The progress of a sweep: the last row of a terminal, or a line whenever a trial has ended."""

import sys
import time
from collections import Counter

from trainer.sweep import trial_log
from trainer.sweep.search import Search
from trainer.sweep.settings import SweepConfig
from trainer.sweep.trial_log import TrialLog


class ProgressLine:
    """Counts the trials of this sweep, and those already in its folder."""

    def __init__(self, settings: SweepConfig, search: Search, trials: TrialLog) -> None:
        self._settings, self._search, self._trial_log = settings, search, trials
        self._on_terminal = sys.stdout.isatty()
        self._began_s, self._shown_s, self._shown = time.monotonic(), 0.0, self._num_over()
        self._over_before = self._num_over()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        print(f"\r\033[K{text}" if self._on_terminal else text, flush=True)

    def show(self, num_running: int, num_queued: int) -> None:
        if time.monotonic() - self._shown_s < 0.5:
            return
        self._shown_s = time.monotonic()
        line = self.line(num_running, num_queued)
        if self._on_terminal:
            print(f"\r\033[K{line}", end="", flush=True)
        elif self._num_over() != self._shown:
            print(line, flush=True)
        self._shown = self._num_over()

    def end(self) -> None:
        if self._on_terminal:
            print("\r\033[K", end="", flush=True)

    def line(self, num_running: int, num_queued: int) -> str:
        counts = Counter(trial.state for trial in self._trial_log.trials.values())
        num_failed = counts[trial_log.FAILED] + counts[trial_log.DIED]
        num_left = num_queued + self._search.num_left() * self._settings.seeds
        over = counts[trial_log.DONE] + counts[trial_log.PRUNED] + num_failed
        words = f"{counts[trial_log.DONE]} done, {num_running} running, {num_failed} failed"
        words += f", {counts[trial_log.PRUNED]} pruned" if counts[trial_log.PRUNED] else ""
        words += f" of {max(over + num_running + num_left, 1)}"
        values = {
            trial.value: trial.folder
            for trial in self._trial_log.trials.values()
            if trial.state == trial_log.DONE and trial.value is not None
        }
        if values:
            best = min(values, key=lambda value: self._settings.sign * value)
            words += f", best {self._settings.metric} {best:.6g} ({values[best]})"
        return words + self._time_left(num_running, num_left)

    def _time_left(self, num_running: int, num_left: int) -> str:
        """An estimate from the pace so far, which includes the cost of running trials beside each other."""
        num_done = self._num_over() - self._over_before
        if num_done <= 0:
            return ""
        pace_s = (time.monotonic() - self._began_s) / (num_done + num_running / 2)
        left_s = pace_s * (num_left + num_running / 2)
        return f", about {left_s / 60:.0f} min left" if left_s >= 90 else f", about {left_s:.0f} s left"

    def _num_over(self) -> int:
        return sum(trial.state in trial_log.FINAL for trial in self._trial_log.trials.values())
