"""Measures the time of steps by parts, and their mean loss."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer import accelerator
from trainer.distributed.ranks import Ranks
from trainer.exact.sum_order import DEFAULT_ORDER, SumOrder
from trainer.report.loss_parts import LossParts
from trainer.report.mfu import ModelFlops
from trainer.state.progress import Update
from trainer.tasks import Task
from trainer.tasks.label_counts import divided, scalar

_ADDED_AT_ONCE = 256  # scalars on the device


@dataclass(frozen=True)
class Mark:
    """The totals of a meter at one moment."""

    steps: int
    skipped: int  # of the steps: without a loss
    sums: Tensor
    total_s: float
    data_s: float
    rest_s: float


class Meter:
    """Running totals over steps; the metrics between two moments are the difference of two marks.

    Only `mean_loss` waits for the device. The clock stops while paused, so that evaluation and
    checkpoints do not count. Seconds are the host's: on a GPU they equal the device's over any interval
    whose loss was read at its end.
    """

    def __init__(
        self,
        ranks: Ranks,
        flops: ModelFlops | None = None,
        order: SumOrder = DEFAULT_ORDER,
        num_replicas: int | None = None,
    ) -> None:
        """`num_replicas` ranks compute losses; None: all."""
        self._ranks, self._flops = ranks, flops
        num_replicas = num_replicas or ranks.world_size
        self._order, self._mean_over = order, order.mean_over(num_replicas)
        self.steps = self._skipped = 0
        self.data_s = 0.0  # waiting for batches
        self.rest_s = 0.0  # logging
        self._sums = order.sum_of([torch.zeros(3, device=ranks.device, dtype=torch.float64)])  # of this rank
        # Loss, plain loss (as evaluation computes it), tokens: added many steps at once, which launches less.
        self._pending: tuple[list[Tensor], ...] = ([], [], [])
        self._has_plain = False
        self.parts = LossParts(ranks, order, self._mean_over / num_replicas)
        self._plain_of_step: list[Tensor] = []
        self._tokens_of_step: list[Tensor] = []
        self._total_s = 0.0
        self._running_since: float | None = None
        self.begin_window()

    def start(self) -> None:
        """Also called while it runs."""
        if self._running_since is None:
            self._running_since = time.perf_counter()

    def pause(self) -> None:
        accelerator.synchronize(self._ranks.device)
        self._total_s = self._now_s()
        self._running_since = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Measure the time spent waiting for batches within the context."""
        begin = time.perf_counter()
        yield
        self.data_s += time.perf_counter() - begin

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Measure time that is not part of a step, such as logging, within the context."""
        begin = time.perf_counter()
        yield
        self.rest_s += time.perf_counter() - begin

    def count_batch(
        self, task: Task, batch: Any, parts: Mapping[str, Any] | None, all_labels: float, label_count: float
    ) -> None:
        """Add the task's metrics of a micro-batch, after its loss was computed; see `divided`."""
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

    def count_step(self, losses: Sequence[Tensor], update: Update) -> None:
        """Add a step to the totals.

        `losses` are the losses of this rank's micro-batches, as detached scalars on the device.

        The losses of a skipped step are not counted: a NaN would stay in the sums.
        """
        self.steps += 1
        self.parts.end_step(made=update is not Update.SKIPPED)
        if update is Update.SKIPPED:
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
        """Called when an epoch begins, and after each line of the log: the next one is of what follows."""
        self.parts.begin_window()
        self.window = self.mark()
        return self.window

    def mean_loss(self, since: Mark) -> float:
        """Mean loss per step over all ranks (a collective); NaN when no step was made."""
        return self._per_step(since)[0] / self._mean_over

    def mean_of_step(self, losses: Sequence[Tensor]) -> float:
        """The mean over all ranks of one step's losses, as `count_step` gets them (a collective).

        Apart from the sums: added to them alone, this step would change the last bit of the next mean.
        """
        total = self._order.sum_of([torch.zeros((), device=self._ranks.device, dtype=torch.float64)])
        if losses:
            total += self._order.sum_of(losses)
        return float(self._order.over_ranks(total)) / self._mean_over

    def metrics(self, since: Mark, global_batch_size: int) -> dict[str, float]:
        """Losses and speed since a mark, by their names in the log (a collective)."""
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
        """Loss, plain loss and tokens, each the sum over all ranks; NaN when no step was made."""
        self._add_pending()
        total, steps = self._order.over_ranks(self._sums - since.sums).tolist(), self.steps - since.steps
        with_loss = steps - (self._skipped - since.skipped)
        counts = (with_loss, with_loss, steps)
        return [value / count if count else float("nan") for value, count in zip(total, counts, strict=True)]

    def ms_per_step(self, since: Mark) -> dict[str, float]:
        """Return milliseconds per step, in total and by part; NaN before the first step."""
        steps = self.steps - since.steps
        scale = 1e3 / steps if steps else float("nan")
        step = (self._now_s() - since.total_s) * scale
        data, rest = (self.data_s - since.data_s) * scale, (self.rest_s - since.rest_s) * scale
        return {"step": step, "data": data, "compute": step - data - rest, "rest": rest}

    def _now_s(self) -> float:
        running = time.perf_counter() - self._running_since if self._running_since is not None else 0.0
        return self._total_s + running
