"""Ranks of an executor as threads of this process: gloo between them is simulated, mailboxes are real.

For what has to do with no lock, signal, generator or heartbeat: of these a process has one for all its threads.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch

from trainer.comm.transport.blame import PeerError
from trainer.comm.transport.gloo import GlooLinks

_T = TypeVar("_T")
TIMEOUT_S = 30.0


class World:
    """The messages between ranks; both ends are matched by sender, receiver and tag, in order."""

    def __init__(self, size: int) -> None:
        self.size, self.texts = size, [""] * size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, int, int, bool], queue.SimpleQueue[_Work]] = {}

    def meet(self, sender: int, receiver: int, tag: int, work: _Work) -> _Work:
        """As gloo does, copy when both have asked, out of the one tensor into the other."""
        with self._lock:
            others = self._waiting.setdefault((sender, receiver, tag, not work.sends), queue.SimpleQueue())
            own = self._waiting.setdefault((sender, receiver, tag, work.sends), queue.SimpleQueue())
            if others.empty():
                own.put(work)
                return work
            other = others.get()
            source, target = (work, other) if work.sends else (other, work)
            assert (source.tensor.dtype, source.tensor.numel()) == (
                target.tensor.dtype,
                target.tensor.numel(),
            )
            target.tensor.copy_(source.tensor)
        work.done.set()
        other.done.set()
        return work


class _Work:
    def __init__(self, tensor: torch.Tensor, sends: bool) -> None:
        self.tensor, self.sends, self.done = tensor, sends, threading.Event()

    def wait(self, timeout: timedelta) -> None:
        if not self.done.wait(timeout.total_seconds()):
            raise RuntimeError("timed out")


class _Group:
    """The part of a process group that a link uses."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        return self._world.meet(self._rank, peer, tag, _Work(tensors[0], sends=True))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        return self._world.meet(peer, self._rank, tag, _Work(tensors[0], sends=False))


class PlayedLinks(GlooLinks):
    def __init__(self, world: World, rank: int) -> None:
        self.rank, self.timeout_s, self._world = rank, TIMEOUT_S, world
        self._group: Any = _Group(world, rank)

    def exchange(self, text: str) -> list[str]:
        self._world.texts[self.rank] = text
        self._world.barrier.wait()
        texts = list(self._world.texts)
        self._world.barrier.wait()
        return texts


def run_threads(fn: Callable[..., _T], world_size: int, *args: Any, **kwargs: Any) -> list[_T]:
    """What `fn(links, *args, **kwargs)` returned, by rank.

    Each wait of a rank for another has a deadline. Raises what a rank has raised by itself, if any has.
    """
    world = World(world_size)

    def ranks_part(rank: int) -> _T:
        try:
            return fn(PlayedLinks(world, rank), *args, **kwargs)
        except BaseException:
            world.barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(ranks_part, rank) for rank in range(world_size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, (threading.BrokenBarrierError, PeerError)))
    return [future.result() for future in futures]
