"""End a run before its last step, for `train.early_stopping` and `train.max_hours`."""

import math
import time
from collections.abc import Mapping
from typing import Any

from trainer.config import EarlyStoppingConfig


class EarlyEnd:
    """Counts evaluations without an improvement, and the hours of a run over all its resumes."""

    def __init__(self, stop: EarlyStoppingConfig | None = None, max_hours: float | None = None) -> None:
        self._stop, self._max_hours = stop, max_hours
        self._best = -math.inf if stop is not None and stop.mode == "max" else math.inf
        self._best_step = self._waited = 0
        self._hours_before, self._started_s = 0.0, time.monotonic()
        self._out_of_time = False

    def after_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count an evaluation; `metrics` are the same on every rank."""
        if self._stop is None:
            return
        value = metrics[self._stop.metric]
        gain = self._best - value if self._stop.mode == "min" else value - self._best
        self._waited += 1
        if gain > self._stop.min_delta:  # false for NaN
            self._best, self._best_step, self._waited = value, step, 0

    def time_is_up(self) -> bool:
        """Return whether `max_hours` have passed. Call on rank 0 only, because clocks of ranks differ."""
        return self._max_hours is not None and self.hours() >= self._max_hours

    def end(self) -> None:
        """End the run; called on every rank after the same step."""
        self._out_of_time = True

    @property
    def setting(self) -> str | None:
        """The setting that ends the run now; None if the run continues."""
        if self._stop is not None and self._waited >= self._stop.patience:
            return "train.early_stopping"
        return "train.max_hours" if self._out_of_time else None

    def why(self) -> str:
        """Return, for the log, why the run ends now and how to continue it."""
        if self._stop is None or self.setting != "train.early_stopping":
            return f"train.max_hours={self._max_hours:g} is reached; set a larger value or null to continue"
        min_delta = f" by more than {self._stop.min_delta:g}" if self._stop.min_delta else ""
        return (
            f"train.early_stopping: {self._stop.metric} has not improved{min_delta} on {self._best:.6g}, at "
            f"step {self._best_step}, in {self._waited} evaluations; set a larger "
            "train.early_stopping.patience, or train.early_stopping=null, to continue"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, without the elapsed time, which differs between otherwise identical runs."""
        if self._stop is None:
            return {}
        state = {"best": self._best, "best_step": self._best_step, "waited": self._waited}
        return state | {"metric": self._stop.metric, "mode": self._stop.mode}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore `saved`, unless it was saved with another metric or mode."""
        stop = self._stop
        if stop is not None and (saved.get("metric"), saved.get("mode")) == (stop.metric, stop.mode):
            self._best, self._best_step = saved["best"], saved["best_step"]
            self._waited = saved["waited"]

    def continue_after(self, hours: float) -> None:
        """Add the hours that the run took before this resume, even if `train.max_hours` was not set then."""
        self._hours_before = hours
        self._out_of_time = self._max_hours is not None and hours >= self._max_hours

    def hours(self) -> float:
        """Return how long the run has taken, over all its resumes."""
        return self._hours_before + (time.monotonic() - self._started_s) / 3600
