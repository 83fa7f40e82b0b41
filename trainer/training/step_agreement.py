"""What all ranks agree on before each update: a finite loss, whether to stop, which data comes next."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed.agreement import gather_objects
from trainer.distributed.process_group import Dist, extremes
from trainer.errors import NonFiniteError
from trainer.exact.order import SumOrder
from trainer.step import Asked
from trainer.tasks.label_counts import Divisor, divisors


class Agreed(NamedTuple):
    """What all ranks know after a step."""

    asked: Asked
    data_left: bool
    """Whether all have data for another step of this epoch."""
    not_finite: NonFiniteError | None
    """The error of a loss that was NaN or Inf on some rank."""


class StepAgreement:
    """One all-reduce of five numbers per step, hidden behind the backward pass.

    `start` is called after the last forward pass of a step and `finish` before its update, so
    that every rank leaves the loop at the same step. On CUDA the numbers are sent on a separate stream:
    the host then waits for the end of the forward pass while the backward pass keeps the device busy, and
    no kernel queue runs dry.

    Args:
        bad_sample: names a sample of this rank's part of the step with NaN or Inf; called if its loss is.
    """

    def __init__(self, dist_: Dist, bad_sample: Callable[[], str | None] = lambda: None) -> None:
        self._dist, self._bad_sample = dist_, bad_sample
        # MAX over ranks of (rank + 1 if its loss is not finite else 0), what it asks for, no data left, and
        # the extremes of the label counts of its next micro-batches.
        self._flags = torch.zeros(5, device=dist_.device)
        self._values: list[float] = []  # on CPUs, what this rank sends
        self._not_finite, self._asked, self._ended, *self._count_extremes = self._flags.unbind()
        self._bad = torch.tensor(float(dist_.rank + 1), device=dist_.device)
        self._good = torch.tensor(0.0, device=dist_.device)
        self._work: dist.Work | None = None
        self._on_cuda = dist_.device.type == "cuda"
        if self._on_cuda:
            self._stream = torch.cuda.Stream(dist_.device)
            self._done = torch.cuda.Event()
            self._on_host = torch.zeros(5, pin_memory=True)
        self._label_counts: Sequence[float] | None = None  # of this rank's micro-batches of the next step
        self._even = True  # whether those of all ranks are equal

    def start(self, loss: Tensor, asked: Asked, data_left: bool, label_counts: Sequence[float] = ()) -> None:
        """Send this rank's values.

        Args:
            loss: a detached scalar on the rank's device.
            label_counts: of its micro-batches of the next step; empty if it has none to compute.
        """
        self._label_counts = label_counts
        if self._on_cuda:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._write(loss, asked, data_left, label_counts)
                if self._work is not None:
                    self._work.wait()  # makes this stream wait, not the host
                self._on_host.copy_(self._flags, non_blocking=True)
                self._done.record()
            loss.record_stream(self._stream)
        else:
            bad = 0.0 if math.isfinite(loss) else self._dist.rank + 1.0
            self._values = [bad, asked, not data_left, *extremes(label_counts)]
            if self._dist.world_size > 1:
                self._flags = torch.tensor(self._values)
                self._send()

    def finish(self, where: str, then: str = "no rank applied that step") -> Agreed:
        """Wait for the values of all ranks.

        Args:
            where: where the loss was computed, such as `step 3`.
            then: what happened to the gradients of a loss that is not finite.
        """
        if self._on_cuda:
            self._done.synchronize()
            bad, asked, ended, most, minus_least = self._on_host.tolist()
        elif self._work is not None:
            self._work.wait()
            bad, asked, ended, most, minus_least = self._flags.tolist()
        else:
            bad, asked, ended, most, minus_least = self._values
        error = self._not_finite_on(int(bad) - 1, where, then) if bad else None
        self._even = most == -minus_least
        return Agreed(Asked(int(asked)), not ended, error)

    def _not_finite_on(self, rank: int, where: str, then: str) -> NonFiniteError:
        """The error of a loss on `rank`, with the sample to blame if one is (a collective)."""
        own = self._bad_sample() if rank == self._dist.rank else None
        sample = (gather_objects(own) if self._dist.world_size > 1 else [own])[rank]
        look = "Lower optim.lr, set train.clip_grad_norm, or check the data of that rank"
        if sample is not None:
            look = f"Its data has NaN or Inf itself, in {sample}: fix it, or leave it out"
        return NonFiniteError(
            f"the loss of {where} is NaN or Inf on {self._dist.describe(rank)}; {then}. {look}", ranks=(rank,)
        )

    def all_have(self, data_left: bool) -> bool:
        """Whether all ranks have data for the first step of an epoch (a collective)."""
        self._label_counts = None
        missing = torch.tensor(float(not data_left), device=self._dist.device)
        if self._dist.world_size > 1:
            dist.all_reduce(missing, dist.ReduceOp.MAX)
        return not missing.item()

    @property
    def knows_label_counts(self) -> bool:
        """Whether `start` sent the next step's label counts; not so before the first step of an epoch."""
        return self._label_counts is not None

    def agree_on_label_counts(self, label_counts: Sequence[float]) -> None:
        """Agree on the label counts of the next step, as `start` and `finish` do (a collective)."""
        counts = torch.tensor(extremes(label_counts), device=self._dist.device)
        if self._dist.world_size > 1:
            dist.all_reduce(counts, dist.ReduceOp.MAX)
        most, minus_least = counts.tolist()
        self._label_counts, self._even = label_counts, most == -minus_least

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
        total = order.total(self._label_counts, self._dist.device)
        return divisors(self._label_counts, total / order.mean_over(num_replicas))

    def _write(self, loss: Tensor, asked: Asked, data_left: bool, label_counts: Sequence[float]) -> None:
        torch.where(torch.isfinite(loss), self._good, self._bad, out=self._not_finite)
        # fill_ passes the number with the launch. `flags[1] = number` in torch before 2.15 copies it
        # from the host and waits, on a stream that waits for the forward pass: the queue runs dry.
        self._asked.fill_(asked)
        self._ended.fill_(not data_left)
        for flag, extreme in zip(self._count_extremes, extremes(label_counts), strict=True):
            flag.fill_(extreme)
        self._send()

    def _send(self) -> None:
        if self._dist.world_size > 1:
            self._work = dist.all_reduce(self._flags, dist.ReduceOp.MAX, async_op=True)
