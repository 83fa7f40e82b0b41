"""The parts of a loss that a task names: their means for the log, with the weights of the loss itself."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.distributed.agreement import gather_objects
from trainer.distributed.ranks import Ranks
from trainer.errors import UserError
from trainer.exact.sum_order import SumOrder
from trainer.tasks.label_counts import divided, scalar

_ADDED_AT_ONCE = 256  # scalars on the device
_TAKEN = {"loss", "plain_loss", "lr", "grad_norm", "epoch", "update_to_weight", "skipped_steps"}


class LossParts:
    """Sums of each part and of its weights since the last line of the log; only `means` waits for the device.

    The weight of a micro-batch is its share of the counted labels of its step. A part is the mean over the
    micro-batches that name it, so that each of a GAN's losses is the mean over its own steps.

    Args:
        of_rank: what the weights of a rank's micro-batches add up to in a step whose ranks weigh the same.
    """

    def __init__(self, ranks: Ranks, order: SumOrder, of_rank: float = 1) -> None:
        self._ranks, self._order, self._of_rank = ranks, order, of_rank
        self._of_step: list[tuple[str, Tensor, float]] = []
        self._pending: list[tuple[str, Tensor, float]] = []
        self._sums: dict[str, Tensor] = {}  # of value and weight, as `order` adds them

    def add(self, parts: Mapping[str, Any] | None, all_labels: float, label_count: float) -> None:
        """Add those of a micro-batch; see `divided`.

        Raises:
            UserError: one is not a number, or has the name of another metric.
        """
        for name, part in (parts or {}).items():
            if name not in self._sums:
                self._sums[name] = self._zero()
                if name in _TAKEN or str(name).startswith("lr/"):  # of a group of parameters
                    raise UserError(
                        f"the loss names a part {name}, but train/{name} is another metric; rename it"
                    )
            plain = part.detach().clone() if isinstance(part, Tensor) else part  # not a CUDA graph's own
            value = scalar(plain, f"the part {name} of the loss", self._ranks.device).float()
            share = label_count / all_labels if all_labels else math.nan
            self._of_step.append((name, divided(value, all_labels, label_count), share))

    def end_step(self, made: bool) -> None:
        """Count what was added since the last step, unless the step was skipped."""
        if not self._of_step:  # as of most tasks, in each step
            return
        if made:
            times = Counter(name for name, *_ in self._of_step)
            self._pending += [  # a step without labels counts as 0, as its loss does
                (name, value, self._of_rank / times[name] if math.isnan(share) else share)
                for name, value, share in self._of_step
            ]
        self._of_step.clear()
        if len(self._pending) >= _ADDED_AT_ONCE:
            self._add_pending()

    def begin_window(self) -> None:
        """Forget what was added: the next means are of what follows."""
        self._pending.clear()
        self._sums.clear()

    def means(self) -> dict[str, float]:
        """The mean of each part over all ranks (a collective): a rank, or a step, may have none."""
        self._add_pending()
        own = list(self._sums)
        everyones = gather_objects(own)
        names = list(dict.fromkeys(name for theirs in everyones for name in theirs))
        if not names:
            return {}
        sums = torch.stack([self._sums.get(name, self._zero()) for name in names], dim=-2)
        pairs = zip(names, self._order.over_ranks(sums).tolist(), strict=True)
        return {name: value / weight for name, (value, weight) in pairs if weight}

    def _add_pending(self) -> None:
        for name in dict.fromkeys(name for name, *_ in self._pending):
            values = torch.stack([value for other, value, _ in self._pending if other == name]).double()
            shares = [share for other, _, share in self._pending if other == name]
            rows = torch.stack([values, values.new_tensor(shares)], 1).unbind()
            self._sums[name] = self._sums.get(name, self._zero()) + self._order.sum_of(rows)
        self._pending.clear()

    def _zero(self) -> Tensor:
        return self._order.sum_of([torch.zeros(2, device=self._ranks.device, dtype=torch.float64)])
