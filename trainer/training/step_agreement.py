"""What all ranks agree on before each update: a finite loss, whether to stop, which data comes next."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.distributed.agreement import gather_objects
from trainer.distributed.collectives import extremes
from trainer.distributed.process_group import Dist
from trainer.errors import NonFiniteError
from trainer.exact.order import SumOrder
from trainer.step import AfterStep
from trainer.tasks.label_counts import Divisor, divisors
from trainer.training.maxima import maxima_over


class Agreed(NamedTuple):
    """What all ranks know after a step."""

    after: AfterStep
    data_left: bool
    """Whether all have data for another step of this epoch."""
    not_finite: NonFiniteError | None
    """The error of a loss that was NaN or Inf on some rank."""


class StepAgreement:
    """Five numbers per step that all ranks know before its update.

    They are: whose loss is not finite, what is asked for, whether data has ended, and the largest and the
    negated smallest label count. `start` is called after the last forward pass of a step and `finish`
    before its update, so that every rank leaves the loop at the same step.

    Args:
        bad_sample: names a sample of this rank's part of the step with NaN or Inf; called if its loss is.
    """

    def __init__(self, dist: Dist, bad_sample: Callable[[], str | None] = lambda: None) -> None:
        self._dist, self._bad_sample = dist, bad_sample
        self._maxima = maxima_over(dist)
        self._no_loss = torch.zeros((), device=dist.device)
        self._label_counts: Sequence[float] | None = None  # of this rank's micro-batches of the next step
        self._even = True  # whether those of all ranks are equal

    def start(
        self, loss: Tensor, asked: AfterStep, data_left: bool, label_counts: Sequence[float] = ()
    ) -> None:
        """Send this rank's values.

        Args:
            loss: a detached scalar on the rank's device.
            label_counts: of its micro-batches of the next step; empty if it has none to compute.
        """
        self._label_counts = label_counts
        self._maxima.start(loss, (float(asked), float(not data_left), *extremes(label_counts)))

    def finish(self, where: str) -> Agreed:
        """Wait for the values of all ranks.

        Args:
            where: where the loss was computed, such as `step 3`.
        """
        bad, asked, ended, most, minus_least = self._maxima.finish()
        error = self._not_finite_on(int(bad) - 1, where) if bad else None
        self._even = most == -minus_least
        return Agreed(AfterStep(int(asked)), not ended, error)

    def _not_finite_on(self, rank: int, where: str) -> NonFiniteError:
        """The error of a loss on `rank`, with the sample to blame if one is (a collective)."""
        own = self._bad_sample() if rank == self._dist.rank else None
        sample = (gather_objects(own) if self._dist.world_size > 1 else [own])[rank]
        look = "Lower optim.lr, set train.clip_grad_norm, or check the data of that rank"
        if sample is not None:
            look = f"Its data has NaN or Inf itself, in {sample}: fix it, or leave it out"
        return NonFiniteError(
            f"the loss of {where} is NaN or Inf on {self._dist.describe(rank)}; no rank applied that step. "
            f"{look}",
            ranks=(rank,),
        )

    def all_have(self, data_left: bool) -> bool:
        """Whether all ranks have data for the first step of an epoch (a collective)."""
        self.start(self._no_loss, AfterStep.CONTINUE, data_left)
        self._label_counts = None
        return self.finish("no step").data_left

    @property
    def knows_label_counts(self) -> bool:
        """Whether `start` sent the next step's label counts; not so before the first step of an epoch."""
        return self._label_counts is not None

    def agree_on_label_counts(self, label_counts: Sequence[float]) -> None:
        """Agree on the label counts of the next step, as `start` and `finish` do (a collective)."""
        self.start(self._no_loss, AfterStep.CONTINUE, data_left=True, label_counts=label_counts)
        self.finish("no step")

    def divisors(self, num_micro_batches: int, num_replicas: int, order: SumOrder) -> list[Divisor]:
        """The divisor of each micro-batch's mean loss in the next step, so that the losses add up.

        The mean over ranks, or with `train.exact` their sum, is then the mean over all counted labels, and 0
        without any. A collective if micro-batches differ in how many labels count, and free otherwise.

        Args:
            num_micro_batches: micro-batches of the step, over all replicas.
        """
        assert self._label_counts is not None
        if self._even:
            return [
                num_micro_batches // order.mean_over(num_replicas) if count else None
                for count in self._label_counts
            ]
        self._dist.heartbeat.enter("data")
        own = order.sum_of(torch.tensor([0.0, *self._label_counts], dtype=torch.float64).unbind())
        total = order.over_ranks(own.to(self._dist.device))
        return divisors(self._label_counts, total / order.mean_over(num_replicas))
