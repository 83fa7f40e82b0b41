"""All workers' statistics of pulls and pushes, combined for the log and for the table at the end."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from trainer.comm.timeline import Timeline
from trainer.strategies.parameter_server.worker_copy import WorkerCopy

if TYPE_CHECKING:
    pass


class ExchangeStats:
    """Created on every rank; all ranks call its methods at the same time.

    Args:
        servers, workers: their ranks.
        held: bytes on each server.
        copy: this rank's, if it is a worker.
        of_timeline: a worker's metrics of its timeline.
    """

    def __init__(
        self,
        servers: Sequence[int],
        workers: Sequence[int],
        held: Sequence[int],
        copy: WorkerCopy | None,
        of_timeline: Callable[[Timeline], dict[str, float]],
    ) -> None:
        self._servers, self._workers, self._held = servers, workers, held
        self._copy, self._of_timeline = copy, of_timeline

    def metrics(self) -> dict[str, float]:
        """Means per step since the last call (a collective): bytes by server, waits by worker."""
        mine: dict[str, float] = {}
        if self._copy is not None:
            mine = self._copy.client.metrics() | self._of_timeline(self._copy.timeline)
        metrics = self._of_workers(mine)
        pulls = max(1.0, sum(own["pulls"] for own in metrics) / len(metrics))
        found = {name: value for name, value in metrics[0].items() if name.startswith("comm/")}
        for number, server in enumerate(self._servers):
            moved = sum(own[f"bytes/{number}"] for own in metrics)
            found[f"ps/megabytes/server_{server}"] = moved / pulls / 1e6
        for worker, own in zip(self._workers, metrics, strict=True):
            found[f"ps/waited_ms/worker_{worker}"] = 1e3 * own["waited_s"] / max(1.0, own["pulls"])
        return found

    def summary(self) -> str:
        """The table of the whole run (a collective)."""
        mine = (self._copy.timeline.summary(), self._copy.client.totals()) if self._copy else ("", {})
        totals = self._of_workers(mine)
        return "\n".join([totals[0][0], *self._lines([own for _, own in totals])])

    def _lines(self, workers: Sequence[Mapping[str, float]]) -> Iterator[str]:
        """The traffic of each server, and how long each worker waited for values, over the run."""
        for number, server in enumerate(self._servers):
            moved = sum(own[f"bytes/{number}"] for own in workers)
            held = self._held[number]
            yield f"server, rank {server}: holds {held / 1e6:.3g} MB, moved {moved / 1e6:.4g} MB"
        for worker, own in zip(self._workers, workers, strict=True):
            waited = 1e3 * own["waited_s"] / max(1.0, own["pulls"])
            yield f"worker, rank {worker}: waited {waited:.2f} ms a pull for values"

    def _of_workers(self, value: Any) -> list[Any]:
        """The `value` of every worker, on every rank (a collective)."""
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, value if self._copy is not None else None)
        return [everyones[worker] for worker in self._workers]
