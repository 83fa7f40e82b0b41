"""The progress of a run, and its total number of steps."""

from dataclasses import dataclass, replace
from enum import Enum

from trainer.config import TrainConfig
from trainer.errors import UserError


class Update(Enum):
    """The outcome of a step's update; the same on every rank."""

    MADE = 0
    SKIPPED = 1
    """Skipped by `train.skip_nonfinite`, because a loss or a gradient is NaN or Inf."""
    OVERFLOW = 2
    """Skipped because a gradient overflows in fp16; the loss scale has been lowered."""
    READ_PAST = 3
    """Skipped by `train.skip_steps`: its samples are read, and nothing is computed."""

    @property
    def has_loss(self) -> bool:
        """Whether the loss of the step counts in the means that are logged."""
        return self in (Update.MADE, Update.OVERFLOW)


@dataclass
class Progress:
    """The progress of a run. All counts are over all ranks, so that they do not depend on the world size.

    ``samples_in_epoch`` samples of epoch ``epoch`` are done; training continues with the next sample, in the
    order that seed and epoch determine. Unlike steps, samples define the position of a run for any batch
    size.
    """

    step: int = 0
    epoch: int = 0
    samples_in_epoch: int = 0
    samples_seen: int = 0
    skipped_steps: int = 0  # steps without an update, for any reason in `Update`
    skipped_in_a_row: int = 0  # because of NaN, Inf or an overflow
    evaluated_step: int = -1  # the last evaluation that the schedule and early stopping have used

    def advance(self, global_batch_size: int, data_left: bool, update: Update = Update.MADE) -> None:
        """Count one optimizer step, and end the epoch if no data is left for another step."""
        self.step += 1
        self.skipped_steps += update is not Update.MADE
        if update is not Update.READ_PAST:
            self.skipped_in_a_row = 0 if update is Update.MADE else self.skipped_in_a_row + 1
        self.samples_in_epoch += global_batch_size
        self.samples_seen += global_batch_size
        if not data_left:
            self.end_epoch()

    def end_epoch(self) -> None:
        """Move to the next epoch; the rest of this epoch, which is less than a batch, is not used."""
        self.epoch, self.samples_in_epoch = self.epoch + 1, 0

    def skip_short_rest(self, global_batch_size: int, num_samples: int) -> None:
        """End the epoch if less than a batch remains, which is possible after a change of the batch size."""
        if num_samples - self.samples_in_epoch < global_batch_size:
            self.end_epoch()

    def steps_to_go(self, epochs: int, global_batch_size: int, num_samples: int) -> int:
        """Return the number of steps of ``global_batch_size`` samples to the end of ``epochs`` epochs."""
        if self.epoch >= epochs:
            return 0
        in_this_epoch = (num_samples - self.samples_in_epoch) // global_batch_size
        return in_this_epoch + (epochs - self.epoch - 1) * (num_samples // global_batch_size)

    def epochs(self, num_samples: int | None) -> float:
        """Return the number of epochs done; with an unknown ``num_samples``, complete epochs only."""
        return self.epoch + (self.samples_in_epoch / num_samples if num_samples else 0.0)


def planned_steps(begin: Progress, train: TrainConfig, num_samples: int | None) -> int:
    """Return the number of steps of the whole run; a stream of unknown length may end earlier."""
    total = _planned_steps(begin, train, num_samples)
    if beyond := [steps for steps in train.skip_steps if steps[0] > total]:
        raise UserError(f"train.skip_steps contains {beyond[0]}, but the last step is {total}; remove it")
    return total


def _planned_steps(begin: Progress, train: TrainConfig, num_samples: int | None) -> int:
    if num_samples is None:
        if train.max_steps is None:
            raise UserError(
                "train.max_steps is null, but the training data is a stream of unknown length: set "
                "train.max_steps=N, which determines the learning-rate schedule and the remaining time"
            )
        return train.max_steps
    begin = replace(begin)
    begin.skip_short_rest(train.global_batch_size, num_samples)
    full_epochs = begin.step + begin.steps_to_go(train.epochs, train.global_batch_size, num_samples)
    return min(train.max_steps or full_epochs, full_epochs)
