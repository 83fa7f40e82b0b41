"""Forked launches that replace torchrun."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from benchmarks import drilled_run, restarts
from tests.forked import Forked


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forked]:
    with contextlib.ExitStack() as stack:
        launches = Forked(stack)
        monkeypatch.setattr(drilled_run, "ranks_of", launches.ranks)
        monkeypatch.setattr(restarts, "_rank", lambda pid: f"of pid {pid}")
        monkeypatch.setattr(restarts, "on_hosts", launches.on_hosts)
        yield launches
