"""Links from this rank to each other rank, and to itself: one process may be worker and server."""

import threading
from collections import deque
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.comm.transport.blame import PeerError
from trainer.comm.transport.gloo import RECEIVED, SENT, GlooLink

# Tags. Even ones go from worker to server, odd ones from server to worker.
HELLO, REQUEST, COMMIT = 2, 4, 6
ANSWER = 5
_FIRST_BUCKET = 8


def up(bucket: int) -> int:
    """The tag of a bucket sent to a server."""
    return _FIRST_BUCKET + 2 * bucket


def down(bucket: int) -> int:
    return _FIRST_BUCKET + 2 * bucket + 1


class Transfer(Protocol):
    def wait(self) -> None:
        """Return when the tensor may be read or written again. Raises PeerError."""


class Link(Protocol):
    def send(self, tensor: Tensor, tag: int) -> Transfer: ...

    def receive(self, tensor: Tensor, tag: int) -> Transfer: ...


class PeerLink:
    """A link to another rank, over a gloo group; tensors are contiguous, on the CPU, and not empty."""

    def __init__(self, group: dist.ProcessGroup, peer: int, timeout_s: float) -> None:
        self._link = GlooLink(group, peer, timeout_s)

    def send(self, tensor: Tensor, tag: int) -> Transfer:
        return _GlooTransfer(self._link, self._link.send(tensor, tag), SENT)

    def receive(self, tensor: Tensor, tag: int) -> Transfer:
        return _GlooTransfer(self._link, self._link.receive(tensor, tag), RECEIVED)


class _GlooTransfer:
    def __init__(self, link: GlooLink, work: dist.Work, due: str) -> None:
        self._link, self._work, self._due = link, work, due

    def wait(self) -> None:
        self._link.wait(self._work, self._due)


class Loopback:
    """A link between two threads of this process. A message moves once both sides are ready, as on a network.

    The later side copies it; the order in which the two then wait does not matter.
    """

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._sent: dict[int, deque[_Half]] = {}
        self._awaited: dict[int, deque[_Half]] = {}
        self._lock = threading.Lock()

    def send(self, tensor: Tensor, tag: int) -> Transfer:
        return self._match(tensor, tag, self._sent, self._awaited, SENT)

    def receive(self, tensor: Tensor, tag: int) -> Transfer:
        return self._match(tensor, tag, self._awaited, self._sent, RECEIVED)

    def _match(self, tensor: Tensor, tag: int, own: "_Halves", others: "_Halves", due: str) -> Transfer:
        half = _Half(tensor, PeerError.silent_for(self._rank, self._timeout_s, due), self._timeout_s)
        with self._lock:
            waiting = others.get(tag)
            if not waiting:
                own.setdefault(tag, deque()).append(half)
                return half
            other = waiting.popleft()
        source, target = (half, other) if due == SENT else (other, half)
        with torch.no_grad():
            target.tensor.copy_(source.tensor)
        half.done.set()
        other.done.set()
        return half


class _Half:
    """One side of a message."""

    def __init__(self, tensor: Tensor, late: PeerError, timeout_s: float) -> None:
        self.tensor, self.done = tensor, threading.Event()
        self._late, self._timeout_s = late, timeout_s

    def wait(self) -> None:
        if not self.done.wait(self._timeout_s):
            raise self._late


_Halves = dict[int, deque[_Half]]
