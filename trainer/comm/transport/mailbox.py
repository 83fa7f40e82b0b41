"""Messages between processes of one host through shared memory: see docs/mailbox.md.

A sender copies a chunk into a slot of its own memory, which its peers have mapped, and tells them over a
Unix socket; they read it there and acknowledge. The memory has no name (memfd), so nothing is left behind
when a process dies, and /dev/shm may be small. A dead peer is noticed at once, because its socket closes.

A socket holds a limited number of packets; sending one more waits for the reader. So a mailbox has
a window: a sender with that many unacknowledged messages reads acknowledgements before it sends again.
Neither socket ever holds more packets than the window, which its buffer is sized for: no send waits in the
kernel, at any number of ranks. Why waits for acknowledgements cannot form a cycle: see executor.py.

Measured on one host with 4 ranks, as multiples of the speed of gloo's all-reduce: hierarchical 1.93 with it
and 0.70 without, tree 2.33 and 0.76. On two hosts with 4 ranks each the time is the same, for 208 ms of
processor time instead of 312 (2 cores, 2026-11-22).
"""

import errno
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from trainer.comm.transport.blame import PeerError

_MESSAGE = struct.Struct("=IIQ")  # tag, slot, bytes
_HELLO = struct.Struct("=III")  # rank, slots, window
_ALIGNMENT = 4096
_PACKET_ROOM = 1024  # bytes that Linux charges for a small packet (768), rounded up
_TIMEVAL = struct.Struct("@ll")
_CREDENTIALS = struct.Struct("@iII")  # process, user, group


@dataclass
class Slot:
    """A slot of shared memory, free again once every wait in `readers` has returned."""

    index: int
    memory: torch.Tensor  # uint8
    readers: list[Callable[[], None]] = field(default_factory=list)

    def wait(self) -> None:
        for wait in self.readers:
            wait()
        self.readers.clear()


class Outbox:
    """The slots for what this rank sends, used in rotation."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        slot_bytes = -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT
        self.num_slots = num_slots
        num_bytes = max(1, num_slots) * slot_bytes
        self.fd = os.memfd_create("ringmaster-outbox")
        os.ftruncate(self.fd, num_bytes)
        memory = map_slots(self.fd, num_bytes, num_slots)
        self._slots = [Slot(index, slot) for index, slot in enumerate(memory)]
        self._next = 0

    def put(self, chunk: torch.Tensor, dtype: torch.dtype) -> tuple[Slot, torch.Tensor]:
        """Copy `chunk` as `dtype` to the next slot, once its readers are done; return slot and copy."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.wait()
        copy = slot.memory[: chunk.numel() * dtype.itemsize].view(dtype)
        return slot, copy.copy_(chunk)

    def drain(self) -> None:
        """Wait until everything sent from here has been read."""
        for slot in self._slots:
            slot.wait()

    def forget_file(self) -> None:
        """Close the file, which the peers have mapped; the mappings keep the memory."""
        os.close(self.fd)


def map_slots(fd: int, num_bytes: int, num_slots: int) -> list[torch.Tensor]:
    """The memory behind `fd` as `num_slots` uint8 tensors of one size."""
    memory = torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
    return list(memory.chunk(num_slots)) if num_slots else []


class Mailbox:
    """Both directions between this rank and one peer on the same host.

    Args:
        window: messages that may be unacknowledged.
    """

    def __init__(self, peer: int, timeout_s: float, window: int) -> None:
        self.peer = peer
        self._timeout_s, self._window = timeout_s, window
        self._outgoing: socket.socket | None = None
        self._incoming: socket.socket | None = None
        self._slots: list[torch.Tensor] = []
        self._num_sent = self._num_read = 0

    def connect(self, rank: int, address: str, outbox: Outbox) -> None:
        """Connect to the peer, which listens at `address`, and pass it this rank's slots."""
        self._outgoing = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._outgoing.connect(address)
        self._prepare(self._outgoing)
        hello = _HELLO.pack(rank, outbox.num_slots, self._window)
        socket.send_fds(self._outgoing, [hello], [outbox.fd])

    def accept(self, connection: socket.socket, fd: int, num_slots: int, window: int) -> None:
        """Accept the peer's connection and its slots; `window` is the peer's."""
        self._incoming = connection
        self._prepare(connection, window)
        self._slots = map_slots(fd, os.fstat(fd).st_size, num_slots)

    def _prepare(self, connection: socket.socket, window: int | None = None) -> None:
        """Size the socket's buffer for the packets of a window, and set deadlines.

        They are the kernel's: with Python's own, every call would take two system calls.
        """
        room = (window or self._window) * _PACKET_ROOM
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < room:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
        seconds, fraction = divmod(self._timeout_s, 1.0)
        deadline = _TIMEVAL.pack(int(seconds), max(1, int(fraction * 1e6)))  # 0 would mean no deadline
        connection.setblocking(True)
        for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, direction, deadline)

    def send(self, slot: Slot, num_bytes: int, tag: int) -> None:
        """Tell the peer of the message in `slot`, which must not change until the peer has read it."""
        self._wait_read(self._num_sent + 1 - self._window)
        self._send(self._outgoing, _MESSAGE.pack(tag, slot.index, num_bytes))
        self._num_sent += 1
        slot.readers.append(partial(self._wait_read, self._num_sent))

    def _wait_read(self, number: int) -> None:
        while self._num_read < number:
            self._receive(self._outgoing, "to read a message")
            self._num_read += 1

    def receive(self, num_bytes: int, tag: int) -> torch.Tensor:
        """Wait for the next message, which must have this tag and size; read it before `release`."""
        packet = self._receive(self._incoming, "to send a message")
        sent_tag, slot, sent_bytes = _MESSAGE.unpack(packet)
        if (sent_tag, sent_bytes) != (tag, num_bytes):
            raise PeerError(
                self.peer,
                f"sends {sent_bytes} bytes (layout {sent_tag:#x}) where {num_bytes} (layout {tag:#x}) "
                "are expected: it is at another bucket, or has one of another length or dtype",
            )
        return self._slots[slot][:num_bytes]

    def release(self) -> None:
        """Let the sender reuse the slot of the last message received."""
        self._send(self._incoming, b"\0")

    def _send(self, connection: socket.socket | None, packet: bytes) -> None:
        assert connection is not None
        began = time.perf_counter()
        try:
            connection.send(packet)
        except OSError as error:
            raise self._lost(error, "to take a packet", time.perf_counter() - began) from error

    def _receive(self, connection: socket.socket | None, due: str) -> bytes:
        assert connection is not None
        began = time.perf_counter()
        try:
            packet = connection.recv(_MESSAGE.size)
            if not packet:
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        except OSError as error:
            raise self._lost(error, due, time.perf_counter() - began) from error
        return packet

    def _lost(self, error: OSError, due: str, waited_s: float) -> PeerError:
        if isinstance(error, BlockingIOError):  # the deadline of the socket
            return PeerError.silent_for(self.peer, self._timeout_s, due)
        return PeerError.hung_up(self.peer, f"closed its connection ({error.strerror})", due, waited_s)

    def close(self) -> None:
        for connection in (self._outgoing, self._incoming):
            if connection is not None:
                connection.close()


def reach() -> str:
    """What two processes must have in common to open mailboxes: the kernel, its network and the user."""
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{kernel} {Path('/proc/self/ns/net').stat().st_ino} {os.getuid()}"


def open_mailboxes(
    rank: int,
    send_to: Sequence[int],
    receive_from: Sequence[int],
    outbox: Outbox,
    window: int,
    exchange: Callable[[str], list[str]],
    timeout_s: float,
) -> dict[int, Mailbox]:
    """Connect this rank with its peers on the same host; every rank of the group must call it.

    Args:
        window: messages that may be in flight to one peer.
        exchange: gathers one string from every rank, by rank (a collective).

    Raises:
        PeerError: a peer that did not connect within `timeout_s`.
    """
    boxes = {peer: Mailbox(peer, timeout_s, window) for peer in {*send_to, *receive_from}}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.settimeout(timeout_s)
        listener.bind("")  # Linux chooses a name that is not a path: TMPDIR may be too long for a socket
        listener.listen(max(1, len(receive_from)))
        addresses = exchange(listener.getsockname().decode())
        for peer in send_to:
            boxes[peer].connect(rank, addresses[peer], outbox)
        missing = set(receive_from)
        while missing:
            try:
                connection, _ = listener.accept()
            except TimeoutError as error:
                raise PeerError.silent_for(min(missing), timeout_s, "to connect") from error
            if _user_of(connection) != os.getuid():  # any user of this host can connect to such a name
                connection.close()
                continue
            hello, fds, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
            peer, num_slots, its_window = _HELLO.unpack(hello)
            boxes[peer].accept(connection, fds[0], num_slots, its_window)
            os.close(fds[0])  # the mapping keeps the memory
            missing.remove(peer)
    return boxes


def _user_of(connection: socket.socket) -> int:
    """The user of the peer process, from the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
