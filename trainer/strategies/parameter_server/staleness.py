"""How many updates the values lacked from which pushes were computed, as the first server counts them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist

from trainer.comm.timeline.summary import draw_staleness

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class StalenessStats:
    """Created on every rank; all ranks call its methods at the same time, except `plots`.

    Args:
        first_server: its rank.
        own: the live counts of this rank's server, by number of updates; {} without one.
    """

    def __init__(self, first_server: int, own: Mapping[int, int]) -> None:
        self._first_server, self._own = first_server, own

    def metrics(self) -> dict[str, float]:
        """Mean, maximum and shares of pushes, over the run (a collective)."""
        counts = self._counts()
        if not (total := sum(counts.values())):
            return {}
        mean = sum(late * count for late, count in counts.items()) / total
        found = {"ps/staleness/mean": mean, "ps/staleness/max": float(max(counts))}
        return found | {f"ps/staleness/{late}": count / total for late, count in sorted(counts.items())}

    def plots(self) -> dict[str, "Figure"]:
        return {"ps/staleness": draw_staleness(self._own)} if self._own else {}

    def table(self) -> str:
        """(A collective.)"""
        counts = self._counts()
        total = max(1, sum(counts.values()))
        lines = [f"{late:>3} updates late: {count / total:6.1%}" for late, count in sorted(counts.items())]
        return "\n".join(["pushes by the updates that their values lacked:", *lines])

    def _counts(self) -> dict[int, int]:
        box = [dict(self._own)]
        dist.broadcast_object_list(box, src=self._first_server)
        return box[0]
