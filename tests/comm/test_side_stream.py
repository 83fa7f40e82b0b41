"""The executor as GPUs run it, by a double of NCCL and of streams: what is on which stream, and what waits."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.futures import Future

from tests.gpu.played import Stream, streams  # noqa: F401
from trainer import accelerator
from trainer.comm import executor as executor_module
from trainer.comm import overlap
from trainer.comm.algorithms.all_reduce import build
from trainer.comm.executor import Executor
from trainer.comm.overlap import SideStream
from trainer.comm.timeline import BucketRecord

GPU = torch.device("cpu")  # in place of one


class Nccl:
    """In place of torch.distributed: launches are counted, and nothing moves."""

    isend, irecv, ProcessGroup = "isend", "irecv", object

    def __init__(self, log: list[tuple[str, str]]) -> None:
        self._log, self.num_groups = log, 0

    def all_reduce(self, *args: Any, **kwargs: Any) -> None:
        """The first call on the group."""

    def P2POp(self, op: str, tensor: torch.Tensor, group: Any, group_peer: int) -> Any:  # noqa: N802
        return SimpleNamespace(op=op, tensor=tensor)

    def batch_isend_irecv(self, messages: list[Any]) -> list[Any]:
        self.num_groups += 1
        self._log.append((Stream.current.name, "launches a group"))
        tensors = [weakref.ref(message.tensor) for message in messages]
        del messages

        def wait() -> None:
            assert all(tensor() is not None for tensor in tensors), "the GPU still reads and writes them"
            self._log.append((Stream.current.name, "waits for the group"))

        return [SimpleNamespace(wait=wait)]  # one for all messages


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
@pytest.mark.parametrize(("algorithm", "rounds"), [("ring", 4), ("tree", 4), ("hierarchical", 4)])
def test_each_round_of_a_bucket_is_one_group_on_the_side_stream(
    algorithm: str,
    rounds: int,
    wire: torch.dtype | None,
    streams: list[tuple[str, str]],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nccl = Nccl(streams)
    monkeypatch.setattr(executor_module, "dist", nccl)
    monkeypatch.setattr(overlap, "Future", lambda devices: _Future(streams))
    clock: Any = SimpleNamespace(device=GPU, mark=lambda: Stream.current.name, times=lambda *marks: marks)
    monkeypatch.setattr(accelerator, "is_accelerator", lambda device: True)
    executor = Executor(None, build(algorithm, 0, (0, 0, 1)), GPU, wire)  # type: ignore[arg-type]

    def all_reduce(bucket: Any, record: BucketRecord) -> torch.Tensor:
        executor.run(bucket.buffer(), 1)
        return bucket.buffer()

    bucket = torch.zeros(7)
    record = BucketRecord(0, bucket.nbytes, 0.0)
    future = SideStream(all_reduce, clock).submit(SimpleNamespace(buffer=lambda: bucket), record)
    assert future.wait() is bucket
    # The gradients' stream is waited for before anything else, and the bucket outlives their stream's use.
    assert streams[0] == ("side", "waits for an event")
    assert streams[1] == ("main", "1-d kept for side")
    work = streams[2:-1]
    assert {stream for stream, _ in work} == {"side"}, (
        "the backward pass launches nothing and waits for nothing"
    )
    assert nccl.num_groups <= rounds and work.count(("side", "launches a group")) == nccl.num_groups
    # Whoever waits for the future waits for the side stream: it is set while that is current.
    assert streams[-1] == ("side", "sets the future")
    assert record.read_gpu == ("main", "side", "side")
    # No launch comes before the wait for what it reads.
    launched = [what for _, what in work]
    assert launched == ["launches a group", "waits for the group"] * nccl.num_groups


class _Future(Future):  # type: ignore[type-arg]
    def __init__(self, log: list[tuple[str, str]]) -> None:
        super().__init__()
        self._log = log

    def set_result(self, result: torch.Tensor) -> None:
        self._log.append((Stream.current.name, "sets the future"))
        super().set_result(result)
