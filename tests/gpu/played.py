"""Simulated streams of a missing GPU: their work in order, and which stream waits for which."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.futures import Future

from trainer import accelerator
from trainer.comm import overlap


class Stream:
    """Everything that happens while a stream is current is its work; `log` has it, as (stream, what)."""

    log: list[tuple[str, str]]
    current: Stream

    def __init__(self, device: Any = None, name: str = "side") -> None:
        self.name = name

    def wait_stream(self, other: Stream) -> None:
        self.log.append((self.name, f"waits for {other.name}"))

    def wait_event(self, event: Any) -> None:
        self.log.append((self.name, "waits for an event"))


class Event:
    """A mark on a stream whose work is done at once."""

    def __init__(self, device: Any, timing: bool = False) -> None:
        self.at_s = 0.0

    def record(self, stream: Any) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        """All is done."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at_s - self.at_s)


class OneWork:
    """What NCCL returns for a group of messages."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def play(patch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Simulate an accelerator's streams on the CPU; return the log of the work on each."""
    log: list[tuple[str, str]] = []
    Stream.log, Stream.current = log, Stream(name="main")

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, Stream.current = Stream.current, stream
        yield
        Stream.current = before

    def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        log.append((Stream.current.name, f"{tensor.ndim}-d kept for {stream.name}"))

    patch.setattr(accelerator, "stream", Stream)
    patch.setattr(accelerator, "on", on)
    patch.setattr(accelerator, "current_stream", lambda device: Stream.current)
    patch.setattr(torch.Tensor, "record_stream", record_stream)
    return log


def play_gpu(patch: pytest.MonkeyPatch) -> None:
    """Have communication take the CPU for a GPU, and gloo for NCCL: all but streams and events is real."""
    batch = dist.batch_isend_irecv
    play(patch)
    patch.setattr(accelerator, "is_accelerator", lambda device: True)
    patch.setattr(accelerator, "event", Event)
    patch.setattr(overlap, "Future", lambda devices: Future())
    patch.setattr(dist, "batch_isend_irecv", lambda messages: [OneWork(batch(messages))])


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    return play(monkeypatch)
