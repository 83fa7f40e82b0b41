"""Messages between processes of one host through shared memory: see docs/shared-memory.md.

Each rank has memory as large as a bucket, which its peers have mapped. To send a chunk, it copies it to the
place of these elements there, and writes a byte to the peer's socket; the peer adds from there. The memory
has no name (memfd), so nothing is left behind when a process dies, and /dev/shm may be small. A dead peer is
noticed at once, because its socket closes.

Why a chunk is not overwritten before it is read. Within a bucket a rank adds nothing to what it has sent, so
it sends the same elements again only as part of the finished sum. That contains the first message, so the
peer has read it. Before the next bucket a rank waits until its peers have read all of this one.

Why these waits cannot form a cycle with those of executor.py. A rank that waits at the beginning of a bucket
waits for peers at an earlier bucket. A socket holds a limited number of bytes that were sent one by one, and
sending one more waits for the reader; at visit p that wait ends when the peer reads an older message. The
socket has room for all messages that are received after p: only `IN_FLIGHT` segments are in flight, and each
has the messages of one round out. So the one waited for is received at p or before. A rank that waits for a
receive of visit p is past its own receives of p, at its sends. So this wait, too, is for something earlier.
"""

import mmap
import os
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.comm.algorithms.program import Move, messages_in_flight
from trainer.comm.algorithms.schedule import Kind, Schedule

_SENT, _READ = b"s", b"r"  # a message is there; a bucket has been read
_RANK = struct.Struct("=I")
_BYTE_ROOM = 1024  # bytes that Linux charges for a byte sent by itself (768), rounded up
_TIMEVAL = struct.Struct("@ll")
_CREDENTIALS = struct.Struct("@iII")  # process, user, group


class SharedMemory:
    """This rank's messages with its peers on the same host (a collective of `group`).

    Args:
        group: a gloo group; ranks are its own.
        hosts: host index of each rank.
        timeout_s: the longest wait for a peer.

    Attributes:
        peers: the ranks with which this one shares memory.
    """

    def __init__(
        self, group: dist.ProcessGroup, schedule: Schedule, hosts: Sequence[int], timeout_s: float
    ) -> None:
        self._timeout_s, self._memory = timeout_s, torch.empty(0, dtype=torch.uint8)
        self._room = (messages_in_flight(schedule) + 2) * _BYTE_ROOM
        self._file = os.memfd_create("ringmaster")
        rank = dist.get_rank(group)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.settimeout(timeout_s)
            listener.bind("")  # Linux chooses a name that is not a path: TMPDIR may be too long for a socket
            listener.listen(len(hosts))
            told: list[tuple[str, bytes]] = [("", b"")] * len(hosts)
            dist.all_gather_object(told, (reach(), listener.getsockname()), group=group)
            self.peers = {
                peer
                for peer in schedule.peers(*Kind)
                if hosts[peer] == hosts[rank] and told[peer][0] == told[rank][0]
            }
            self._sockets = self._connected(rank, [address for _, address in told], listener)
        self._files = {peer: self._received_file(peer) for peer in self.peers}
        self._views = dict.fromkeys(self.peers, self._memory)
        self._arrived = {peer: Counter[bytes]() for peer in self.peers}
        self._readers, self._writers = set[int](), set[int]()  # in this bucket; of the last one

    def begin(self, num_bytes: int) -> None:
        """Called before the first message of a bucket: wait for the readers of the last one."""
        for peer in self._readers:
            self._wait(peer, _READ)
        self._readers.clear()
        if len(self._memory) < num_bytes:
            os.ftruncate(self._file, num_bytes)
            self._memory = _mapped(self._file)

    def send(self, moves: Sequence[Move], sums: Tensor, wire: torch.dtype) -> None:
        """Send chunks of `sums`, converted to `wire`; one copy serves several peers."""
        copied: set[tuple[int, int]] = set()
        for move in moves:
            if (chunk := (move.begin, move.end)) not in copied:
                _chunk(self._memory, move, wire).copy_(move.chunk(sums))
                copied.add(chunk)
            self._tell(move.peer, _SENT)
            self._readers.add(move.peer)

    def receive(self, move: Move, wire: torch.dtype) -> Tensor:
        """Wait for the next message of the peer; it stays as it is until `end`."""
        self._wait(move.peer, _SENT)
        self._writers.add(move.peer)
        if len(self._views[move.peer]) < move.end * wire.itemsize:
            self._views[move.peer] = _mapped(self._files[move.peer])
        return _chunk(self._views[move.peer], move, wire)

    def end(self) -> None:
        """Called after the last message of a bucket."""
        for peer in self._writers:
            self._tell(peer, _READ)
        self._writers.clear()

    def close(self) -> None:
        """Disconnect, after all peers have read everything."""
        self.begin(0)
        for connection in self._sockets.values():
            connection.close()
        for file in (self._file, *self._files.values()):
            os.close(file)

    def _tell(self, peer: int, what: bytes) -> None:
        try:
            self._sockets[peer].send(what)
        except OSError as error:
            raise self._lost(peer, error) from error

    def _wait(self, peer: int, what: bytes) -> None:
        arrived = self._arrived[peer]
        while not arrived[what]:
            try:
                if not (read := self._sockets[peer].recv(256)):
                    raise ConnectionResetError("it has closed its connection")
            except OSError as error:
                raise self._lost(peer, error) from error
            arrived[_SENT] += read.count(_SENT)
            arrived[_READ] += read.count(_READ)
        arrived[what] -= 1

    def _lost(self, peer: int, error: OSError) -> dist.DistNetworkError:
        """An error that another rank may have caused: the watch looks for the rank that has."""
        if isinstance(error, BlockingIOError):  # the deadline of the socket
            return dist.DistNetworkError(f"rank {peer} did not answer within {self._timeout_s:g} s")
        return dist.DistNetworkError(f"rank {peer} is gone: {error.strerror or error}")

    def _connected(
        self, rank: int, addresses: Sequence[bytes], listener: socket.socket
    ) -> dict[int, socket.socket]:
        """A socket to each peer, through which both have sent their file; the lower rank connects."""
        sockets = {}
        for peer in sorted(peer for peer in self.peers if peer > rank):
            sockets[peer] = socket.socket(socket.AF_UNIX)
            sockets[peer].connect(addresses[peer])
            socket.send_fds(sockets[peer], [_RANK.pack(rank)], [self._file])
        self._first: dict[int, int] = {}
        lower = {peer for peer in self.peers if peer < rank}
        while lower - sockets.keys():
            connection, _ = listener.accept()
            if _user_of(connection) != os.getuid():  # any user of this host can connect to such a name
                connection.close()
                continue
            hello, files, _, _ = socket.recv_fds(connection, _RANK.size, 1)
            peer = int(_RANK.unpack(hello)[0])
            sockets[peer], self._first[peer] = connection, files[0]
            socket.send_fds(connection, [_RANK.pack(rank)], [self._file])
        for connection in sockets.values():
            self._prepare(connection)
        return sockets

    def _received_file(self, peer: int) -> int:
        if peer in self._first:
            return self._first[peer]
        return int(socket.recv_fds(self._sockets[peer], _RANK.size, 1)[1][0])

    def _prepare(self, connection: socket.socket) -> None:
        """Make room for the messages in flight, and set deadlines.

        They are the kernel's: with Python's own, every call would take two system calls.
        """
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < self._room:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._room)
        seconds, fraction = divmod(self._timeout_s, 1.0)
        deadline = _TIMEVAL.pack(int(seconds), max(1, int(fraction * 1e6)))  # 0 would mean no deadline
        connection.setblocking(True)
        for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, direction, deadline)


def reach() -> str:
    """What two processes must have in common to share memory: the kernel, its network and the user."""
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{kernel} {Path('/proc/self/ns/net').stat().st_ino} {os.getuid()}"


def _mapped(file: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)


def _chunk(memory: Tensor, move: Move, wire: torch.dtype) -> Tensor:
    return memory[move.begin * wire.itemsize : move.end * wire.itemsize].view(wire)


def _user_of(connection: socket.socket) -> int:
    """The user of the peer process, from the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
