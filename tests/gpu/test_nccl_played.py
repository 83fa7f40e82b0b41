"""The reducer for NCCL on threads, with simulated streams and messages on the CPU: right sums, and few calls."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.futures import Future

from tests.comm.test_gather_scatter import BUILDS
from tests.gpu.played import Stream, streams  # noqa: F401
from trainer.comm import fsdp_movers
from trainer.comm.algorithms.all_reduce import build
from trainer.comm.algorithms.schedule import Collective
from trainer.comm.timeline.records import BucketRecord
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
@pytest.mark.parametrize(("algorithm", "rounds"), [("ring", 4), ("tree", 4), ("hierarchical", 4)])
def test_a_bucket_is_one_group_a_round_and_recorded_when_it_comes_again(
    algorithm: str, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, recorded, played = Network(), Counter[int](), Counter[int]()

    def record(work: Callable[[], None], stream: Any, pool: Any) -> Callable[[], None]:
        recorded[network.me.rank] += 1
        rank = network.me.rank

        def play() -> None:
            before = network.groups[rank]
            work()
            network.groups[rank] = before  # the host makes one call
            played[rank] += 1

        return play

    monkeypatch.setattr(nccl, "dist", network)
    monkeypatch.setattr(nccl, "agree", lambda *args: None)
    monkeypatch.setattr(nccl, "_recorded", record)
    monkeypatch.setattr(nccl, "Future", lambda devices: Future[torch.Tensor]())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    clock = SimpleNamespace(device=torch.device("cpu"), mark=lambda: None, times=lambda *marks: None)
    hosts, sizes, found = (0, 0, 1), (1, 5, 70_001), {}

    def rank_main(rank: int) -> None:
        network.me.rank = rank
        schedule = build(algorithm, rank, hosts)
        reducer = nccl.NcclReducer(None, NO_LINKS, schedule, clock, wire_dtype=None, cuda_graph=True)  # type: ignore[arg-type]
        buckets = [torch.empty(size) for size in sizes]
        for turn in range(4):
            if turn == 3:
                buckets[1] = torch.empty(7)  # DDP has rebuilt its buckets
            for index, bucket in enumerate(buckets):
                bucket.copy_(torch.arange(len(bucket)) % 7 + rank + turn)
                given = SimpleNamespace(buffer=lambda b=bucket: b, index=lambda i=index: i)
                future = reducer.submit(given, BucketRecord(index, bucket.nbytes, 0.0), len(hosts))  # type: ignore[arg-type]
                found[rank, turn, index] = future.wait().clone()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_DEADLINE_S)
    assert len(found) == 3 * 4 * 3
    for (_, turn, _), mean in found.items():
        assert torch.allclose(mean, torch.arange(len(mean)) % 7 + 1.0 + turn)
    for rank in range(len(hosts)):
        assert recorded[rank] == 3, "each bucket at its second coming, and none that came once"
        assert played[rank] == 3 + 3 + 2
        # launched directly in the first round, and so is the new bucket in the last
        assert network.groups[rank] <= (3 + 1) * rounds


@pytest.mark.usefixtures("streams")
def test_blocks_are_gathered_and_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of several ranges, with both wire dtypes; bytes and half precision unchanged."""
    network = Network()
    monkeypatch.setattr(nccl, "dist", network)
    monkeypatch.setattr(nccl, "agree", lambda *args: None)
    clock = SimpleNamespace(device=torch.device("cpu"), mark=lambda: None)
    hosts, size, right = (0, 1, 0, 1), 5, []

    def rank_main(rank: int) -> None:
        network.me.rank = rank
        own = slice(rank * size, (rank + 1) * size)
        for algorithm, wire in product(("halving_doubling", "hierarchical"), (None, torch.bfloat16)):
            for collective, make in BUILDS.items():
                options = (None, NO_LINKS, make(algorithm, rank, hosts), clock, wire)
                executor = nccl.NcclReducer(*options, collective=collective)  # type: ignore[arg-type]
                bucket = torch.arange(4.0 * size) + (rank if collective is Collective.REDUCE_SCATTER else 0)
                if collective is Collective.ALL_GATHER:
                    bucket[: own.start] = bucket[own.stop :] = 77
                executor.launch(bucket, 4 if collective is Collective.REDUCE_SCATTER else 1)
                if collective is Collective.ALL_GATHER:
                    right.append(torch.equal(bucket, torch.arange(4.0 * size)))
                else:
                    error = bucket[own] - (torch.arange(4.0 * size) + 1.5)[own]
                    right.append(bool(error.abs().max() < (1e-6 if wire is None else 0.5)))

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_DEADLINE_S)
    assert right == [True] * 4 * 2 * 2 * 2


def test_streams_wait_for_blocks_and_the_host_for_nothing(
    streams: list[tuple[str, str]],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        fsdp_movers, "dist", SimpleNamespace(get_world_size=lambda group: 2, get_rank=lambda group: 1)
    )
    clock = SimpleNamespace(
        device=None, mark=lambda: f"mark on {Stream.current.name}", times=lambda *marks: marks
    )

    def launch(bucket: torch.Tensor, divisor: int, number: int) -> tuple[str, ...]:
        streams.append(("side", f"launched with divisor {divisor}"))
        return "ready", "start", "end"

    executor = SimpleNamespace(stream=Stream(), launch=launch)
    both = {Collective.ALL_GATHER: executor, Collective.REDUCE_SCATTER: executor}
    mover = fsdp_movers.OnGpu(both, None, clock)  # type: ignore[arg-type]

    record = BucketRecord(0, 16, 0.0)
    work = mover.gather(0, torch.zeros(4), record)
    assert streams == [("side", "launched with divisor 1")]
    work.wait()
    assert streams.pop() == ("main", "waits for an event")
    assert record.read_gpu == ("ready", "start", "end", "mark on main")

    record, output, buffer = BucketRecord(0, 16, 0.0), torch.zeros(2), torch.arange(4.0)
    mover.scatter(0, output, buffer, True, record)
    launched, kept, waits = streams[1:]
    assert launched == ("side", "launched with divisor 2")
    assert (kept, waits) == (("main", "1-d kept for side"), ("main", "waits for an event"))
    assert output.tolist() == [2.0, 3.0] and record.read_gpu == ("ready", "start", "mark on side")
