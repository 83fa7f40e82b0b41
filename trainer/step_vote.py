"""Agree in each step on the number of labels, the next action, and whether data is left."""

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist

from trainer import accelerator
from trainer.accelerator import is_accelerator
from trainer.comm.shared_memory import HostRows
from trainer.data.loading.loaders import Batches
from trainer.distributed.agreement import gather_objects
from trainer.distributed.ranks import Ranks
from trainer.errors import UserError
from trainer.exact.sum_order import DEFAULT_ORDER, SumOrder


class AfterStep(IntEnum):
    """The action after a step; the largest value that any rank requests applies."""

    CONTINUE = 0
    SAVE = 1
    """`checkpoint.every_minutes` have passed: save."""
    END = 2
    """`train.max_hours` have passed: end the run as after its last step."""
    STOP = 3
    """A signal was received: save and stop."""


class Agreed(NamedTuple):
    """The result of a vote, the same on all ranks."""

    num_labels: float
    """The number of labels that count in all micro-batches of the step."""
    after: AfterStep
    data_left: bool
    """Whether all ranks have data for another step of this epoch."""


class StepVote:
    """Sums six numbers over the ranks in each step, so that all ranks leave the loop after the same step.

    Call `start` when the micro-batches of a step have been read, and `result` when the first loss is known:
    the communication overlaps with the first forward pass. On the CPUs of one host, `rows` (a `HostRows`)
    replaces gloo's all-reduce.
    """

    def __init__(self, ranks: Ranks, order: SumOrder = DEFAULT_ORDER, rows: HostRows | None = None) -> None:
        self._order, self._device = order, ranks.device
        self._world_size, self._on_gpu = ranks.world_size, is_accelerator(ranks.device)
        self._work: dist.Work | None = None
        self._agreed: Agreed | None = None
        self._sums = torch.empty(0)
        self._rows = rows
        if self._on_gpu:
            self._stream, self._done = accelerator.stream(ranks.device), accelerator.event(ranks.device)

    def start(
        self,
        label_counts: Sequence[float],
        after: AfterStep,
        data_left: bool,
        trainable_changed: bool = False,
    ) -> None:
        """Send this rank's requested action, flags, and number of labels in each micro-batch."""
        if self._world_size == 1:
            self._agreed = Agreed(math.fsum(label_counts), after, data_left)
            return
        flags = (
            *(after is each for each in (AfterStep.STOP, AfterStep.END, AfterStep.SAVE)),
            not data_left,
            trainable_changed,
        )
        numbers: list[tuple[float, ...]] = [(math.fsum(label_counts), *flags)]
        if self._order.by_chunks:  # a sum of fractions would round
            numbers = [(0, *flags), *((count, 0, 0, 0, 0, 0) for count in label_counts)]
        self._agreed = None
        self._sums = self._order.sum_of([torch.tensor(row, dtype=torch.float64) for row in numbers])
        if self._rows is not None:
            self._rows.send(self._sums)
            return
        if not self._on_gpu:
            self._work = dist.all_reduce(self._sums, async_op=True)
            return
        self._sums = self._sums.pin_memory()
        with accelerator.on(self._stream):  # does not wait for the kernels of this step
            on_device = self._sums.to(self._device, non_blocking=True)
            work = dist.all_reduce(on_device, async_op=True)
            assert work is not None
            work.wait()  # blocks this stream, not the CPU
            self._sums.copy_(on_device, non_blocking=True)
            self._done.record()

    def result(self) -> Agreed:
        """Wait for the result of this step's vote; later calls in the step return the same result."""
        if self._agreed is None:
            if self._rows is not None:
                self._sums = self._rows.receive().sum(0)
            elif self._work is not None:
                self._work.wait()
            elif self._on_gpu:
                self._done.synchronize()
            num_labels, stops, ends, saves, without_data, changed = self._order.numbers(self._sums).tolist()
            if 0 < changed < self._world_size:
                raise UserError(
                    f"the task's begin_step() changed requires_grad of parameters on {changed:.0f} of "
                    f"{self._world_size} ranks; make it do the same on every rank"
                )
            after = AfterStep.SAVE if saves else AfterStep.CONTINUE
            after = AfterStep.STOP if stops else AfterStep.END if ends else after
            self._agreed = Agreed(num_labels, after, not without_data)
        return self._agreed

    def ranks_out_of_data(self, batches: Batches) -> tuple[list[int], list[int]]:
        """Return the ranks without data for another step, and the ranks with data (a collective)."""
        own = batches.data_left if batches.accumulation else None  # None: this rank reads no data
        data_left = gather_objects(own)
        out_of_data = [rank for rank, left in enumerate(data_left) if left is False]
        return out_of_data, [rank for rank, left in enumerate(data_left) if left]

    def close(self) -> None:
        """Close the connections; called once, after a successful run (a collective)."""
        if self._rows is not None:
            self._rows.close()
