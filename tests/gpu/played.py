"""Simulated streams of a missing GPU: their work in order, and which stream waits for which."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from trainer import accelerator


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


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
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

    monkeypatch.setattr(accelerator, "stream", Stream)
    monkeypatch.setattr(accelerator, "on", on)
    monkeypatch.setattr(accelerator, "current_stream", lambda device: Stream.current)
    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    return log
