"""How far a run has come, and how far it goes."""

from dataclasses import dataclass, replace
from enum import Enum

from trainer.config import TrainConfig
from trainer.errors import UserError


class Update(Enum):
    """What became of the update of a step; the same on every rank."""

    MADE = 0
    SKIPPED = 1
    """A loss or a gradient is NaN or Inf, which `train.skip_nonfinite` permits."""
    OVERFLOW = 2
    """A gradient is NaN or Inf in fp16; the loss scale is lower from now on."""


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
