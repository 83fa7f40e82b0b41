"""Messages between processes of one host through shared memory.

A sender copies a chunk into a slot of its own memory, which its peers have mapped, and tells them over a
Unix socket; they read it there and acknowledge. The memory has no name (memfd), so nothing is left behind
when a process dies, and a dead peer is noticed at once, because its socket closes.
"""

import mmap
import os
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from trainer.comm.execution.blame import PeerError

AVAILABLE = hasattr(os, "memfd_create")  # Linux

_MESSAGE = struct.Struct("=IIQ")  # tag, slot, bytes
_HELLO = struct.Struct("=II")  # rank, slots
_ALIGNMENT = 4096


@dataclass
class Slot:
    """A piece of shared memory that may be written again once every wait in `readers` has returned."""

    index: int
    memory: torch.Tensor  # uint8
    readers: list[Callable[[], None]] = field(default_factory=list)

    def wait(self) -> None:
        for wait in self.readers:
            wait()
        self.readers.clear()


class Outbox:
    """The slots into which this rank puts what it sends, used in turn."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        slot_bytes = -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT
        self.num_slots = num_slots
        num_bytes = max(1, num_slots) * slot_bytes
        self.fd = -1  # memory of this process alone
        if AVAILABLE:
            self.fd = os.memfd_create("ringmaster-outbox")
            os.ftruncate(self.fd, num_bytes)
        memory = map_slots(self.fd, num_bytes, num_slots)
        self._slots = [Slot(index, piece) for index, piece in enumerate(memory)]
        self._next = 0

    def put(self, chunk: torch.Tensor, dtype: torch.dtype) -> tuple[Slot, torch.Tensor]:
        """Copy `chunk` as `dtype` into the next slot, once its readers are done; return slot and copy."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.wait()
        copy = slot.memory[: chunk.numel() * dtype.itemsize].view(dtype)
        copy.copy_(chunk)
        return slot, copy

    def drain(self) -> None:
        """Wait until all that was put here has been read."""
        for slot in self._slots:
            slot.wait()


def map_slots(fd: int, num_bytes: int, num_slots: int) -> list[torch.Tensor]:
    """The memory behind `fd` (new memory, where that is -1) as `num_slots` uint8 tensors of one size."""
    memory = torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
    return list(memory.chunk(num_slots)) if num_slots else []


class Mailbox:
    """Both directions between this rank and one peer on the same host."""

    def __init__(self, peer: int, timeout_s: float) -> None:
        self.peer = peer
        self.waited_s = 0.0  # for this peer, since somebody set it to 0
        self._timeout_s = timeout_s
        self._outgoing: socket.socket | None = None
        self._incoming: socket.socket | None = None
        self._slots: list[torch.Tensor] = []
        self._num_sent = self._num_read = 0

    def connect(self, rank: int, address: str, outbox: Outbox) -> None:
        """Open the way to the peer, which listens at `address`, and hand it this rank's slots."""
        self._outgoing = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._outgoing.settimeout(self._timeout_s)
        self._outgoing.connect(address)
        socket.send_fds(self._outgoing, [_HELLO.pack(rank, outbox.num_slots)], [outbox.fd])

    def accept(self, connection: socket.socket, fd: int, num_slots: int) -> None:
        """Take the way from the peer and its slots."""
        self._incoming = connection
        self._slots = map_slots(fd, os.fstat(fd).st_size, num_slots)

    def send(self, slot: Slot, num_bytes: int, tag: int) -> None:
        """Tell the peer of the message in `slot`, which stays as it is until the peer has read it."""
        assert self._outgoing is not None
        try:
            self._outgoing.send(_MESSAGE.pack(tag, slot.index, num_bytes))
        except OSError as error:
            raise PeerError(self.peer, f"closed its connection ({error.strerror})") from error
        self._num_sent += 1
        slot.readers.append(partial(self._wait_read, self._num_sent))

    def _wait_read(self, number: int) -> None:
        while self._num_read < number:
            self._receive(self._outgoing)
            self._num_read += 1

    def receive(self, num_bytes: int, tag: int) -> torch.Tensor:
        """Wait for the next message, which must be of `tag` and size; read it before `release`."""
        packet = self._receive(self._incoming)
        sent_tag, slot, sent_bytes = _MESSAGE.unpack(packet)
        if (sent_tag, sent_bytes) != (tag, num_bytes):
            raise PeerError(
                self.peer,
                f"sends {sent_bytes} bytes (layout {sent_tag:#x}) where {num_bytes} (layout {tag:#x}) "
                "are due: its bucket has another length or dtype",
            )
        return self._slots[slot][:num_bytes]

    def release(self) -> None:
        """Let the sender write the slot of the message received last again."""
        assert self._incoming is not None
        try:
            self._incoming.send(b"\0")
        except OSError as error:
            raise PeerError(self.peer, f"closed its connection ({error.strerror})") from error

    def _receive(self, connection: socket.socket | None) -> bytes:
        assert connection is not None
        began = time.perf_counter()
        try:
            packet = connection.recv(_MESSAGE.size)
        except TimeoutError as error:
            raise PeerError(self.peer, f"did not answer within {self._timeout_s:g} s", silent=True) from error
        except OSError as error:
            raise PeerError(self.peer, f"closed its connection ({error.strerror})") from error
        finally:
            self.waited_s += time.perf_counter() - began
        if not packet:
            raise PeerError(self.peer, "closed its connection")
        return packet

    def close(self) -> None:
        for connection in (self._outgoing, self._incoming):
            if connection is not None:
                connection.close()


def open_mailboxes(
    rank: int,
    send_to: Sequence[int],
    receive_from: Sequence[int],
    outbox: Outbox,
    exchange: Callable[[str], list[str]],
    timeout_s: float,
) -> dict[int, Mailbox]:
    """Connect this rank with its peers on the same host; every rank of the group must call it.

    Where the system has no memory to share, there are no mailboxes: gloo serves within the host too.

    Args:
        exchange: gathers one string from every rank, by rank (a collective).
    """
    if not AVAILABLE:
        return {}
    boxes = {peer: Mailbox(peer, timeout_s) for peer in {*send_to, *receive_from}}
    folder = Path(tempfile.mkdtemp(prefix="ringmaster-"))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.settimeout(timeout_s)
            listener.bind(str(folder / "mailbox"))
            listener.listen(max(1, len(receive_from)))
            addresses = exchange(str(folder / "mailbox"))
            for peer in send_to:
                boxes[peer].connect(rank, addresses[peer], outbox)
            for _ in receive_from:
                connection, _ = listener.accept()
                connection.settimeout(timeout_s)
                hello, fds, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
                peer, num_slots = _HELLO.unpack(hello)
                boxes[peer].accept(connection, fds[0], num_slots)
                os.close(fds[0])  # the mapping keeps the memory
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return boxes
