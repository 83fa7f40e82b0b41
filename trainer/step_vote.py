"""What all ranks agree on in each step: how many labels count, whether to stop, whether data is left."""

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
from trainer.exact.sum_order import AS_THEY_COME, SumOrder


class AfterStep(IntEnum):
    """What follows a step: the largest that any rank asks for."""

    CONTINUE = 0
    SAVE = 1
    """The time between two checkpoints is up."""
    END = 2
    """The time of the run is up: it ends as after its last step."""
    STOP = 3
    """A signal came: save and stop."""


class Agreed(NamedTuple):
    """What all ranks know of a step."""

    num_labels: float
    """Counted labels in all micro-batches of the step."""
    after: AfterStep
    data_left: bool
    """Whether all have data for another step of this epoch."""


class StepVote:
    """One sum over ranks, of six numbers, in each step.

    `start` is called when the micro-batches of a step have been read, and `result` when its first loss is
    computed: the numbers travel meanwhile. Because of them, every rank leaves the loop after the same step.
    """

    def __init__(self, ranks: Ranks, order: SumOrder = AS_THEY_COME, rows: HostRows | None = None) -> None:
        """`rows`: in place of an all-reduce by gloo, where all ranks are of one host."""
        self._order, self._device = order, ranks.device
        self._world_size, self._on_gpu = ranks.world_size, is_accelerator(ranks.device)
        self._work: dist.Work | None = None
        self._agreed: Agreed | None = None
        self._sums = torch.empty(0)
        self._rows = rows
        if self._on_gpu:
            self._stream, self._done = accelerator.stream(ranks.device), accelerator.event(ranks.device)

    def start(
        self, label_counts: Sequence[float], asked: AfterStep, data_left: bool, other_trained: bool = False
    ) -> None:
        """Send this rank's numbers.

        Args:
            label_counts: of its micro-batches of this step.
            data_left: whether it has data for another step of this epoch.
            other_trained: whether `begin_step` has frozen parameters, or made some trainable.
        """
        if self._world_size == 1:
            self._agreed = Agreed(math.fsum(label_counts), asked, data_left)
            return
        asks = (
            *(asked is each for each in (AfterStep.STOP, AfterStep.END, AfterStep.SAVE)),
            not data_left,
            other_trained,
        )
        numbers: list[tuple[float, ...]] = [(math.fsum(label_counts), *asks)]
        if self._order.by_chunks:  # a sum of fractions would round
            numbers = [(0, *asks), *((count, 0, 0, 0, 0, 0) for count in label_counts)]
        self._agreed = None
        self._sums = self._order.sum_of([torch.tensor(row, dtype=torch.float64) for row in numbers])
        if self._rows is not None:
            self._rows.send(self._sums)
            return
        if not self._on_gpu:
            self._work = dist.all_reduce(self._sums, async_op=True)
            return
        self._sums = self._sums.pin_memory()
        with accelerator.on(self._stream):  # waits for no kernel of this step
            there = self._sums.to(self._device, non_blocking=True)
            work = dist.all_reduce(there, async_op=True)
            assert work is not None
            work.wait()  # makes this stream wait, not the host
            self._sums.copy_(there, non_blocking=True)
            self._done.record()

    def result(self) -> Agreed:
        """Wait for the numbers of all ranks; after the first call in a step, return them again.

        Raises:
            UserError: only some ranks train other parameters than before; raised on every rank.
        """
        if self._agreed is None:
            if self._rows is not None:
                self._sums = self._rows.receive().sum(0)
            elif self._work is not None:
                self._work.wait()
            elif self._on_gpu:
                self._done.synchronize()
            num_labels, stops, ends, saves, without_data, others = self._order.numbers(self._sums).tolist()
            if 0 < others < self._world_size:
                raise UserError(
                    f"the task's begin_step() changed requires_grad of parameters on {others:.0f} of "
                    f"{self._world_size} ranks; let it do the same on every rank"
                )
            on = AfterStep.SAVE if saves else AfterStep.CONTINUE
            after = AfterStep.STOP if stops else AfterStep.END if ends else on
            self._agreed = Agreed(num_labels, after, not without_data)
        return self._agreed

    def ended(self, batches: Batches) -> tuple[list[int], list[int]]:
        """The ranks without data for another step of the epoch, and those with (a collective)."""
        own = batches.data_left if batches.accumulation else None  # of a rank that reads nothing
        left = gather_objects(own)
        without, having = ([rank for rank, its in enumerate(left) if its is one] for one in (False, True))
        return without, having

    def close(self) -> None:
        """Called once, after a successful run (a collective)."""
        if self._rows is not None:
            self._rows.close()
