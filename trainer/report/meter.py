"""Measure the time per step, in total and by part, and the mean loss."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer import accelerator
from trainer.distributed.ranks import Ranks
from trainer.exact.sum_order import DEFAULT_ORDER, SumOrder
from trainer.report.loss_parts import LossParts
from trainer.report.mfu import ModelFlops
from trainer.run_dir.steps_file import StepRecord
from trainer.state.progress import Update
from trainer.tasks import Task
from trainer.tasks.label_counts import divided, scalar

_ADDED_AT_ONCE = 256  # scalars on the device
_RECORDED_AT_ONCE = 256  # steps, without log steps in between


@dataclass(frozen=True)
class Mark:
    """The totals of a `Meter` at one point in time."""

    steps: int
    skipped: int  # number of these steps that have no loss
    sums: Tensor
    total_s: float
    data_s: float
    rest_s: float


class _Unrecorded(NamedTuple):
    step: int
    losses: Sequence[Tensor]  # of this rank's micro-batches
    grad_norm: Tensor
    has_loss: bool


class Meter:
    """Running totals over steps. The metrics of an interval are the difference between two `Mark`s.

    Only the methods that return losses wait for the device. The clock stops during evaluations and saves, for
    example. On a GPU, the times of an interval are accurate if a loss was read at its end.

    Args:
        num_replicas: the number of ranks that compute losses; None: all.
        record: called on rank 0 with the records of several steps at a time.
    """

    def __init__(
        self,
        ranks: Ranks,
        flops: ModelFlops | None = None,
        order: SumOrder = DEFAULT_ORDER,
        num_replicas: int | None = None,
        record: Callable[[Sequence[StepRecord]], None] = lambda records: None,
    ) -> None:
        self._ranks, self._flops = ranks, flops
        num_replicas = num_replicas or ranks.world_size
        self._order, self._mean_over = order, order.mean_over(num_replicas)
        self.steps = self._skipped = 0
        self.data_s = 0.0  # waiting for batches
        self.rest_s = 0.0  # logging
        self._device_of_sums = accelerator.for_sums(ranks.device)
        self._sums = order.sum_of([self._zeros(3)])  # of this rank
        # Loss, plain loss (as evaluation computes it), tokens: added for many steps at once, to launch less.
        self._pending: tuple[list[Tensor], ...] = ([], [], [])
        self._has_plain = False
        self.parts = LossParts(ranks, order, self._mean_over / num_replicas)
        self._record, self._unrecorded = record, list[_Unrecorded]()
        self._plain_of_step: list[Tensor] = []
        self._tokens_of_step: list[Tensor] = []
        self._total_s = 0.0
        self._running_since: float | None = None
        self.begin_epoch()

    def start(self) -> None:
        """Start the clock, unless it is running."""
        if self._running_since is None:
            self._running_since = time.perf_counter()

    def pause(self) -> None:
        accelerator.synchronize(self._ranks.device)
        self._total_s = self._now_s()
        self._running_since = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within the context, measure time spent waiting for batches."""
        begin = time.perf_counter()
        yield
        self.data_s += time.perf_counter() - begin

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Within the context, measure time that is not part of a step, such as logging."""
        begin = time.perf_counter()
        yield
        self.rest_s += time.perf_counter() - begin

    def count_batch(
        self, task: Task, batch: Any, parts: Mapping[str, Any] | None, all_labels: float, label_count: float
    ) -> None:
        """Add the task's metrics of a micro-batch; see `divided` for the numbers of labels."""
        self.parts.add(parts, all_labels, label_count)
        plain = getattr(task, "plain_loss", None)
        if plain is not None:
            self._has_plain = True
            plain = scalar(plain, f"{type(task).__name__}.plain_loss", self._ranks.device)
            self._plain_of_step.append(divided(plain, all_labels, label_count))
        if (num_tokens := getattr(task, "num_tokens", None)) is not None:
            source = f"{type(task).__name__}.num_tokens"
            self._tokens_of_step.append(scalar(num_tokens(batch), source, self._ranks.device))
        if self._flops is not None:
            self._flops.see(batch)

    def count_step(self, step: int, losses: Sequence[Tensor], grad_norm: Tensor, update: Update) -> None:
        """Add a step, given the losses of this rank's micro-batches, as detached scalars on the device.

        The losses of a skipped step are not counted, because a NaN would stay in the sums. Every 256 steps,
        records are written (a collective).
        """
        self.steps += 1
        self.parts.end_step(made=update.has_loss)
        self._unrecorded.append(_Unrecorded(step, losses, grad_norm, update.has_loss))
        if len(self._unrecorded) >= _RECORDED_AT_ONCE:
            self.record_steps()
        if not update.has_loss:
            self._skipped += 1
        else:
            self._pending[0].extend(losses)
            self._pending[1].extend(self._plain_of_step)
        self._pending[2].extend(self._tokens_of_step)
        self._plain_of_step.clear()
        self._tokens_of_step.clear()
        if len(self._pending[0]) >= _ADDED_AT_ONCE:
            self._add_pending()

    def _add_pending(self) -> None:
        for total, numbers in zip(self._sums.unbind(-1), self._pending, strict=True):
            if numbers:
                total += self._order.sum_of(numbers)
                numbers.clear()

    def mark(self) -> Mark:
        self._add_pending()
        now = (self._now_s(), self.data_s, self.rest_s)
        return Mark(self.steps, self._skipped, self._sums.clone(), *now)

    def begin_window(self) -> Mark:
        """Start the interval of the next log line, at the start of an epoch and after each log line."""
        self.parts.begin_window()
        self.window = self.mark()
        return self.window

    def begin_epoch(self) -> None:
        self.epoch_start = self.begin_window()

    def mean_loss(self, since: Mark) -> float:
        """Return the mean loss per step over all ranks; NaN without a step (a collective)."""
        return self._per_step(since)[0] / self._mean_over

    def record_steps(self) -> list[float]:
        """Record the steps since the last call, and return their losses (a collective)."""
        return self._over_ranks(self._sums[..., :0]) if self._unrecorded else []

    def metrics(self, since: Mark, global_batch_size: int) -> dict[str, float]:
        """Return losses and speed since the mark `since`, by their names in the log (a collective)."""
        loss, plain, tokens = self._per_step(since)  # waits for the device, so that the times are complete
        ms = self.ms_per_step(since)
        step_s = ms["step"] / 1e3
        values = {"train/loss": loss / self._mean_over}
        values["usage/samples_per_second"] = global_batch_size / step_s
        if self._has_plain:
            values["train/plain_loss"] = plain / self._mean_over
        if tokens > 0:
            values["usage/tokens_per_second"] = tokens / step_s
        if self._flops is not None and (mfu := self._flops.utilisation(step_s)) is not None:
            values["usage/mfu"] = mfu
        return values | {f"usage/ms_per_step/{part}": value for part, value in ms.items()}

    def _per_step(self, since: Mark) -> list[float]:
        """Return loss, `plain_loss` and tokens per step over all ranks; NaN without a step (a collective)."""
        self._add_pending()
        total, steps = self._over_ranks(self._sums - since.sums)[:3], self.steps - since.steps
        with_loss = steps - (self._skipped - since.skipped)
        counts = (with_loss, with_loss, steps)
        return [value / count if count else float("nan") for value, count in zip(total, counts, strict=True)]

    def _over_ranks(self, sums: Tensor) -> list[float]:
        """Return `sums` over all ranks, followed by the mean loss of each step to record (a collective).

        A single all-reduce adds both.
        """
        steps, self._unrecorded = self._unrecorded, []
        none = torch.zeros((), device=self._ranks.device)
        micro_batches = zip_longest(*(step.losses for step in steps), fillvalue=none)
        rows = (accelerator.double(torch.stack(losses)) for losses in micro_batches)
        losses = self._order.sum_of([self._zeros(len(steps)), *rows])
        numbers = self._order.over_ranks(torch.cat([sums, losses], -1)).tolist()
        first = len(numbers) - len(steps)
        numbers[first:] = [number / self._mean_over for number in numbers[first:]]
        if steps and self._ranks.is_main:
            norms = torch.stack([step.grad_norm for step in steps]).tolist()
            numbered = zip(steps, norms, numbers[first:], strict=True)
            self._record(
                [
                    StepRecord(step.step, *((norm, loss) if step.has_loss else (math.nan, math.nan)))
                    for step, norm, loss in numbered
                ]
            )
        return numbers

    def ms_per_step(self, since: Mark) -> dict[str, float]:
        """Return milliseconds per step, in total and by part; NaN before the first step."""
        steps = self.steps - since.steps
        scale = 1e3 / steps if steps else float("nan")
        step = (self._now_s() - since.total_s) * scale
        data, rest = (self.data_s - since.data_s) * scale, (self.rest_s - since.rest_s) * scale
        return {"step": step, "data": data, "compute": step - data - rest, "rest": rest}

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self._device_of_sums, dtype=torch.float64)

    def _now_s(self) -> float:
        running = time.perf_counter() - self._running_since if self._running_since is not None else 0.0
        return self._total_s + running
