"""Means of the named parts of a loss, for the log, weighted like the loss."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.accelerator import double, for_sums
from trainer.distributed.agreement import gather_objects
from trainer.distributed.ranks import Ranks
from trainer.errors import UserError
from trainer.exact.sum_order import SumOrder
from trainer.tasks.label_counts import divided, scalar

_BATCH_SIZE = 256  # scalars on the device that are added at once
_RESERVED = {"loss", "plain_loss", "lr", "grad_norm", "epoch", "update_to_weight", "skipped_steps"}


class LossParts:
    """Sums of each part and of its weights since the last log line. Only `means` waits for the device.

    The weight of a micro-batch is its fraction of the labels that count in its step. The mean of a part is
    over the micro-batches that have it, so that each loss of a GAN is averaged over its own steps.
    """

    def __init__(self, ranks: Ranks, order: SumOrder, rank_weight: float = 1) -> None:
        self._ranks, self._order, self._rank_weight = ranks, order, rank_weight
        self._step_parts: list[tuple[str, Tensor, float]] = []
        self._pending: list[tuple[str, Tensor, float]] = []
        self._sums: dict[str, Tensor] = {}  # sums of value and weight, as `order` adds them

    def add(self, parts: Mapping[str, Any] | None, all_labels: float, label_count: float) -> None:
        """Add the parts of a micro-batch; see `divided` for the arguments."""
        for name, part in (parts or {}).items():
            if name not in self._sums:
                self._sums[name] = self._zero()
                if name in _RESERVED or str(name).startswith("lr/"):  # lr/ is for parameter groups
                    raise UserError(
                        f"the loss has a part {name}, but train/{name} is another metric; rename the part"
                    )
            plain = part.detach().clone() if isinstance(part, Tensor) else part  # a CUDA graph reuses it
            value = scalar(plain, f"the part {name} of the loss", self._ranks.device).float()
            share = label_count / all_labels if all_labels else math.nan
            self._step_parts.append((name, divided(value, all_labels, label_count), share))

    def end_step(self, made: bool) -> None:
        """Count the parts added since the last step, unless the step was skipped."""
        if not self._step_parts:  # most tasks have no parts
            return
        if made:
            times = Counter(name for name, *_ in self._step_parts)
            self._pending += [  # a step without labels counts as 0, as its loss does
                (name, value, self._rank_weight / times[name] if math.isnan(share) else share)
                for name, value, share in self._step_parts
            ]
        self._step_parts.clear()
        if len(self._pending) >= _BATCH_SIZE:
            self._add_pending()

    def begin_window(self) -> None:
        """Set the sums to zero, at the start of a log interval."""
        self._pending.clear()
        self._sums.clear()

    def means(self) -> dict[str, float]:
        """Return the mean of each part over all ranks (a collective); some ranks may have no parts."""
        self._add_pending()
        own = list(self._sums)
        names = list(dict.fromkeys(name for part_names in gather_objects(own) for name in part_names))
        if not names:
            return {}
        sums = torch.stack([self._sums.get(name, self._zero()) for name in names], dim=-2)
        pairs = zip(names, self._order.over_ranks(sums).tolist(), strict=True)
        return {name: value / weight for name, (value, weight) in pairs if weight}

    def _add_pending(self) -> None:
        for name in dict.fromkeys(name for name, *_ in self._pending):
            values = double(torch.stack([value for other, value, _ in self._pending if other == name]))
            shares = [share for other, _, share in self._pending if other == name]
            rows = torch.stack([values, values.new_tensor(shares)], 1).unbind()
            self._sums[name] = self._sums.get(name, self._zero()) + self._order.sum_of(rows)
        self._pending.clear()

    def _zero(self) -> Tensor:
        device = for_sums(self._ranks.device)
        return self._order.sum_of([torch.zeros(2, device=device, dtype=torch.float64)])
