"""How far a run has come, how far it goes, and what ends it before: `train.stop` and `train.max_hours`."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainer.config import StopConfig, TrainConfig
from trainer.errors import UserError


@dataclass
class Progress:
    """How far a run has come. All counts are global, so that they mean the same at any world size.

    ``samples_in_epoch`` samples of epoch ``epoch`` are done; the next one follows in the order drawn from
    (seed, epoch). Samples, unlike steps, define the position of a run for any batch size.
    """

    step: int = 0
    epoch: int = 0
    samples_in_epoch: int = 0
    samples_seen: int = 0
    skipped_steps: int = 0  # without an update: by train.skip_nonfinite, or for an overflow in fp16
    skipped_in_a_row: int = 0
    evaluated_step: int = -1  # of the last evaluation that the schedule and early stopping have seen

    def advance(self, global_batch_size: int, data_left: bool, is_made: bool = True) -> None:
        """Count one optimizer step; without data left for another, the epoch ends with it.

        Args:
            is_made: whether the step has made an update.
        """
        self.step += 1
        self.skipped_steps += not is_made
        self.skipped_in_a_row = 0 if is_made else self.skipped_in_a_row + 1
        self.samples_in_epoch += global_batch_size
        self.samples_seen += global_batch_size
        if not data_left:
            self.end_epoch()

    def end_epoch(self) -> None:
        """Move to the next epoch; the rest of this one, less than a batch, is not trained on."""
        self.epoch, self.samples_in_epoch = self.epoch + 1, 0

    def skip_short_rest(self, global_batch_size: int, num_samples: int) -> None:
        """End the epoch if less than a batch is left of it, after steps of another batch size."""
        if num_samples - self.samples_in_epoch < global_batch_size:
            self.end_epoch()

    def steps_to_go(self, epochs: int, global_batch_size: int, num_samples: int) -> int:
        """Steps from here to the end of ``epochs`` epochs, all of them of ``global_batch_size``."""
        if self.epoch >= epochs:
            return 0
        in_this_epoch = (num_samples - self.samples_in_epoch) // global_batch_size
        return in_this_epoch + (epochs - self.epoch - 1) * (num_samples // global_batch_size)

    def epochs(self, num_samples: int | None) -> float:
        """Epochs done, of ``num_samples`` each; of unknown length, whole ones only."""
        return self.epoch + (self.samples_in_epoch / num_samples if num_samples else 0.0)


def planned_steps(begin: Progress, train: TrainConfig, num_samples: int | None) -> int:
    """The steps of the whole run; `begin` may come from a run with another batch size.

    A stream of unknown length, for which `num_samples` is None, may end earlier, with its last epoch.

    Raises:
        UserError: such a stream without train.max_steps.
    """
    if num_samples is None:
        if train.max_steps is None:
            raise UserError(
                "train.max_steps is null, but the training data is a stream of unknown length: set "
                "train.max_steps=N, which the schedule and the remaining time need"
            )
        return train.max_steps
    begin = replace(begin)
    begin.skip_short_rest(train.global_batch_size, num_samples)
    full_epochs = begin.step + begin.steps_to_go(train.epochs, train.global_batch_size, num_samples)
    return min(train.max_steps or full_epochs, full_epochs)


class EarlyEnd:
    """Counts evaluations without a better metric, and the hours of a run over all its resumes.

    Args:
        stop: None: evaluations end nothing.
        max_hours: None: the clock ends nothing.
    """

    def __init__(self, stop: StopConfig | None = None, max_hours: float | None = None) -> None:
        self._stop, self._max_hours = stop, max_hours
        self._best = -math.inf if stop is not None and stop.mode == "max" else math.inf
        self._best_step = self._waited = 0
        self._hours_before, self._began_s = 0.0, time.monotonic()
        self._out_of_time = False

    def after_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count an evaluation; `metrics` are the same on every rank."""
        if self._stop is None:
            return
        value = metrics[self._stop.metric]
        gain = self._best - value if self._stop.mode == "min" else value - self._best
        self._waited += 1
        if gain > self._stop.min_delta:  # not so for NaN
            self._best, self._best_step, self._waited = value, step, 0

    def time_is_up(self) -> bool:
        """Return whether `max_hours` is over. Call on rank 0 only, because clocks differ between ranks."""
        return self._max_hours is not None and self.hours() >= self._max_hours

    def end(self) -> None:
        """Called on every rank at the same step, when `time_is_up` on one."""
        self._out_of_time = True

    @property
    def setting(self) -> str | None:
        """The setting that ends the run here; None: it goes on."""
        if self._stop is not None and self._waited >= self._stop.patience:
            return "train.stop"
        return "train.max_hours" if self._out_of_time else None

    def why(self) -> str:
        """Why the run ends here, and how to go on, for people."""
        if self._stop is None or self.setting != "train.stop":
            return f"train.max_hours={self._max_hours:g} are over; a larger one, or null, continues from here"
        gained = f" by more than {self._stop.min_delta:g}" if self._stop.min_delta else ""
        return (
            f"train.stop: {self._stop.metric} has not become better{gained} than {self._best:.6g}, of step "
            f"{self._best_step}, in {self._waited} evaluations; a larger train.stop.patience, or "
            "train.stop=null, continues from here"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, without the hours: they differ between runs that are otherwise equal."""
        if self._stop is None:
            return {}
        found = {"best": self._best, "best_step": self._best_step, "waited": self._waited}
        return found | {"metric": self._stop.metric, "mode": self._stop.mode}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `saved`, of which only what is set here counts; it may be of other settings."""
        stop = self._stop
        if stop is not None and (saved.get("metric"), saved.get("mode")) == (stop.metric, stop.mode):
            self._best, self._best_step = saved["best"], saved["best_step"]
            self._waited = saved["waited"]

    def continue_after(self, hours: float) -> None:
        """Continue a run that had taken this long, with or without `train.max_hours`."""
        self._hours_before = hours
        self._out_of_time = self._max_hours is not None and hours >= self._max_hours

    def hours(self) -> float:
        """Return how long the run has taken, over all its resumes."""
        return self._hours_before + (time.monotonic() - self._began_s) / 3600
