"""The reducer for NCCL on threads, with simulated streams and messages on the CPU: right sums, and few calls."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.futures import Future

from tests.gpu.played import streams  # noqa: F401
from trainer.comm.algorithms.all_reduce import build
from trainer.comm.timeline import BucketRecord
from trainer.comm.transport import nccl

_DEADLINE_S = 60
NO_LINKS = SimpleNamespace(to=lambda peer: None)


class Network:
    """In place of torch.distributed for the reducer: sends and receives between threads, counted by rank."""

    isend, irecv = "isend", "irecv"

    def __init__(self) -> None:
        self.me = threading.local()
        self.groups: Counter[int] = Counter()
        # All there beforehand: of two threads that ask a defaultdict at once, each gets a box of its own.
        self._boxes: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {
            pair: queue.Queue() for pair in product(range(8), repeat=2)
        }

    def all_reduce(self, *args: Any, **kwargs: Any) -> None:
        """The first call on the group."""

    def P2POp(self, op: str, tensor: torch.Tensor, group: Any, group_peer: int) -> Any:  # noqa: N802
        return SimpleNamespace(op=op, tensor=tensor, peer=group_peer)

    def batch_isend_irecv(self, messages: list[Any]) -> list[Any]:
        rank = self.me.rank
        self.groups[rank] += 1
        for message in messages:
            if message.op == self.isend:
                self._boxes[rank, message.peer].put(message.tensor.clone())
        for message in messages:
            if message.op == self.irecv:
                came = self._boxes[message.peer, rank].get(timeout=_DEADLINE_S)
                assert (came.shape, came.dtype) == (message.tensor.shape, message.tensor.dtype)
                message.tensor.copy_(came)
        return [SimpleNamespace(wait=lambda: None)]


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
@pytest.mark.parametrize(("algorithm", "rounds"), [("ring", 4), ("tree", 4), ("hierarchical", 4)])
def test_a_bucket_is_one_group_a_round(
    algorithm: str, rounds: int, wire: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network()
    monkeypatch.setattr(nccl, "dist", network)
    monkeypatch.setattr(nccl, "agree", lambda *args: None)
    monkeypatch.setattr(nccl, "Future", lambda devices: Future[torch.Tensor]())
    clock = SimpleNamespace(device=torch.device("cpu"), mark=lambda: None, times=lambda *marks: None)
    hosts, sizes, found = (0, 0, 1), (1, 5, 70_001), {}

    def rank_main(rank: int) -> None:
        network.me.rank = rank
        schedule = build(algorithm, rank, hosts)
        reducer = nccl.NcclReducer(None, NO_LINKS, schedule, clock, wire)  # type: ignore[arg-type]
        for index, size in enumerate(sizes):
            bucket = torch.arange(size) % 7 + float(rank)
            given = SimpleNamespace(buffer=lambda b=bucket: b)
            future = reducer.submit(given, BucketRecord(index, bucket.nbytes, 0.0), len(hosts))  # type: ignore[arg-type]
            found[rank, index] = future.wait().clone()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_DEADLINE_S)
    assert len(found) == 3 * 3
    for mean in found.values():
        error = (mean - (torch.arange(len(mean)) % 7 + 1.0)).abs().max()
        assert error < (1e-5 if wire is None else 0.1)
    assert all(network.groups[rank] <= len(sizes) * rounds for rank in range(len(hosts)))
