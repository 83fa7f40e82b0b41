"""Messages between processes of one host through shared memory: see docs/shared-memory.md.

Each rank has slots of memory, which its peers have mapped. To send a chunk, it copies it to the next slot and
tells its peers over a socket where it is; they add from there, and answer. Few slots stay in the processor's
cache; memory as large as a bucket would not. The memory has no name (memfd), so nothing is left behind when a
process dies, and /dev/shm may be small. A dead peer is noticed at once, because its socket closes.

Why these waits cannot form a cycle with those of executor.py. A rank sends when two things have room: the
next slot, which the readers of the chunk in it have read, and the window of each peer, a number of messages
that it may not have read yet. At visit p both have room for all messages that are received after p: only
`IN_FLIGHT` segments are in flight, and each has the messages of one round out. So a wait for room ends when
a peer receives an older message, at p or before. A rank that waits for a receive of visit p is past its own
receives of p, at its sends. So this wait, too, is for something earlier. No wait is in the kernel: a socket
has room for the messages of a window and for the answers to one.
"""

import mmap
import os
import socket
import struct
from collections import Counter, deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.comm.algorithms.program import Move, chunks_in_flight, largest_chunk, messages_in_flight
from trainer.comm.algorithms.schedule import Kind, Op, Phase, Schedule
from trainer.distributed.agreement import gather_objects
from trainer.distributed.collectives import backstop
from trainer.distributed.ranks import Ranks

_PAGE = 4096
_RANK = struct.Struct("=I")
_WHERE = struct.Struct("=Q")  # the first byte of a chunk in its sender's memory
_READ = (1 << 64) - 1  # in place of it: the answer that the oldest message has been read
_PACKET_ROOM = 1024  # bytes that Linux charges for so short a packet (768), rounded up
_TIMEVAL = struct.Struct("@ll")
_CREDENTIALS = struct.Struct("@iII")  # process, user, group


class SharedMemory:
    """This rank's messages with its peers on the same host (a collective of `group`).

    Args:
        group: a gloo group; ranks are its own.
        hosts: host index of each rank.
        segment_bytes, width: see `trainer.comm.algorithms.pipeline`.
        timeout_s: the longest wait for a peer.

    Attributes:
        peers: the ranks with which this one shares memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        schedule: Schedule,
        hosts: Sequence[int],
        segment_bytes: int,
        width: int,
        timeout_s: float,
    ) -> None:
        self._timeout_s, self._window = timeout_s, messages_in_flight(schedule)
        slot_bytes = -(-largest_chunk(schedule, segment_bytes) // _PAGE) * _PAGE
        num_slots = max(1, chunks_in_flight(schedule, width))
        file = os.memfd_create("ringmaster")
        os.ftruncate(file, num_slots * slot_bytes)
        self._slots = _mapped(file).split(slot_bytes)
        self._next_slot = 0
        # For each slot, who has to read it: the peer, and the number of the message among those to that peer.
        self._readers: list[list[tuple[int, int]]] = [[] for _ in self._slots]
        rank = dist.get_rank(group)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.settimeout(timeout_s)
            listener.bind("")  # Linux chooses a name that is not a path: TMPDIR may be too long for a socket
            listener.listen(len(hosts))
            told = gather_objects((listener.getsockname(), self._window), group)
            self.peers = {peer for peer in schedule.peers(*Kind) if hosts[peer] == hosts[rank]}
            self._sockets, files = self._connected(rank, [address for address, _ in told], listener, file)
        for connection in self._sockets.values():
            self._prepare(connection, 2 * max(window for _, window in told))
        self._memory = {peer: _mapped(theirs) for peer, theirs in files.items()}
        for mapped in (file, *files.values()):
            os.close(mapped)
        self._arrived = {peer: deque[int]() for peer in self.peers}
        self._sent, self._read = Counter[int](), Counter[int]()  # messages to each peer; those it has read

    def send(self, moves: Sequence[Move], sums: Tensor, wire: torch.dtype) -> None:
        """Send chunks of `sums`, converted to `wire`; one copy serves several peers."""
        copies: dict[tuple[int, int], int] = {}
        for move in moves:
            if (chunk := (move.begin, move.end)) not in copies:
                slot = copies[chunk] = self._free_slot()
                self._slots[slot][: move.numel * wire.itemsize].view(wire).copy_(move.chunk(sums))
            slot = copies[chunk]
            self._wait_until_read(move.peer, self._sent[move.peer] + 1 - self._window)
            self._tell(move.peer, slot * len(self._slots[0]))
            self._sent[move.peer] += 1
            self._readers[slot].append((move.peer, self._sent[move.peer]))

    def receive(self, move: Move, sums: Tensor, wire: torch.dtype) -> None:
        """Wait for the next message of the peer, and add it to `sums` or copy it there."""
        while not self._arrived[move.peer]:
            self._take_in(move.peer)
        begin = self._arrived[move.peer].popleft()
        move.take(sums, self._memory[move.peer][begin : begin + move.numel * wire.itemsize].view(wire))
        self._tell(move.peer, _READ)

    def close(self) -> None:
        """Disconnect, after all peers have read everything."""
        for peer in self.peers:
            self._wait_until_read(peer, self._sent[peer])
        for connection in self._sockets.values():
            connection.close()

    def _free_slot(self) -> int:
        """The next slot in rotation, once its chunk has been read."""
        slot = self._next_slot
        self._next_slot = (slot + 1) % len(self._slots)
        for reader in self._readers[slot]:
            self._wait_until_read(*reader)
        self._readers[slot].clear()
        return slot

    def _wait_until_read(self, peer: int, number: int) -> None:
        while self._read[peer] < number:
            self._take_in(peer)

    def _tell(self, peer: int, what: int) -> None:
        try:
            self._sockets[peer].send(_WHERE.pack(what), socket.MSG_NOSIGNAL)
        except OSError as error:
            raise self._lost(peer, error) from error

    def _take_in(self, peer: int) -> None:
        """Wait for messages or answers of the peer."""
        try:
            if not (packets := self._sockets[peer].recv(64 * _WHERE.size)):
                raise ConnectionResetError("it has closed its connection")
        except OSError as error:
            raise self._lost(peer, error) from error
        for (what,) in _WHERE.iter_unpack(packets):
            if what == _READ:
                self._read[peer] += 1
            else:
                self._arrived[peer].append(what)

    def _lost(self, peer: int, error: OSError) -> dist.DistNetworkError:
        """An error that another rank may have caused: the watch looks for the rank that has."""
        if isinstance(error, BlockingIOError | TimeoutError):  # the deadline of the socket
            return dist.DistNetworkError(f"rank {peer} did not answer within {self._timeout_s:g} s")
        return dist.DistNetworkError(f"rank {peer} is gone: {error.strerror or error}")

    def _connected(
        self, rank: int, addresses: Sequence[bytes], listener: socket.socket, own: int
    ) -> tuple[dict[int, socket.socket], dict[int, int]]:
        """By peer, a socket to it and its file; the lower rank connects, and sends its file first."""
        sockets, files = dict[int, socket.socket](), dict[int, int]()
        higher, peer = sorted(peer for peer in self.peers if peer > rank), rank
        try:
            for peer in higher:
                sockets[peer] = socket.socket(socket.AF_UNIX)
                sockets[peer].settimeout(self._timeout_s)
                sockets[peer].connect(addresses[peer])
                socket.send_fds(sockets[peer], [_RANK.pack(rank)], [own])
            while missing := self.peers - sockets.keys():
                peer = min(missing)
                connection, _ = listener.accept()
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                if _CREDENTIALS.unpack(credentials)[1] != os.getuid():  # any user of this host can connect
                    connection.close()
                    continue
                hello, received, _, _ = socket.recv_fds(connection, _RANK.size, 1)
                peer = int(_RANK.unpack(hello)[0])
                sockets[peer], files[peer] = connection, received[0]
                socket.send_fds(connection, [_RANK.pack(rank)], [own])
            for peer in higher:
                files[peer] = socket.recv_fds(sockets[peer], _RANK.size, 1)[1][0]
        except OSError as error:
            raise self._lost(peer, error) from error
        return sockets, files

    def _prepare(self, connection: socket.socket, packets: int) -> None:
        """Make room for a number of packets, and set deadlines.

        They are the kernel's: with Python's own, every call would take two system calls.
        """
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < packets * _PACKET_ROOM:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, packets * _PACKET_ROOM)
        seconds, fraction = divmod(self._timeout_s, 1.0)
        deadline = _TIMEVAL.pack(int(seconds), max(1, int(fraction * 1e6)))  # 0 would mean no deadline
        connection.setblocking(True)
        for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, direction, deadline)


class HostRows:
    """A row of each rank, all of one host: it is sent at once, and the others' are read later (a collective).

    Each rank sends its own to all, so that it waits for the slowest rank alone, and no thread takes part:
    between two ranks this takes a tenth of the processor time of an all-reduce by gloo.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._others = [peer for peer in range(self._size) if peer != self._rank]
        sends = [Op(Kind.SEND, peer, self._rank, self._rank + 1) for peer in self._others]
        copies = [Op(Kind.COPY, peer, peer, peer + 1) for peer in self._others]
        schedule = Schedule(self._size, (), (self._rank, self._rank + 1), (Phase((*sends, *copies)),))
        self._memory = SharedMemory(group, schedule, [0] * self._size, _PAGE * self._size, 1, timeout_s)
        self._rows = torch.empty(0)

    def send(self, row: Tensor) -> None:
        """`row`: of one shape and dtype on all ranks, at most 4 KiB."""
        self._rows = row.new_empty(self._size, *row.shape)
        self._rows[self._rank] = row
        self._memory.send(self._moves(Kind.SEND), self._rows.view(-1), row.dtype)

    def receive(self) -> Tensor:
        """The rows (ranks, *row.shape) of the last `send`, the same on all ranks.

        Raises:
            DistNetworkError: a peer is gone, or silent for `timeout_s`.
        """
        for move in self._moves(Kind.COPY):
            self._memory.receive(move, self._rows.view(-1), self._rows.dtype)
        return self._rows

    def _moves(self, kind: Kind) -> list[Move]:
        width = self._rows[0].numel()
        of = ((peer, self._rank if kind is Kind.SEND else peer) for peer in self._others)
        return [Move(kind, peer, row * width, (row + 1) * width) for peer, row in of]

    def close(self) -> None:
        self._memory.close()


def rows_of_host(ranks: Ranks, timeout_s: float) -> HostRows | None:
    """For ranks on the CPUs of one host; None for others (a collective). Waits end as `backstop` says."""
    group, on_cpus = dist.group.WORLD, ranks.device.type == "cpu"
    if ranks.world_size == 1 or not on_cpus or group is None or ranks.num_hosts > 1:
        return None
    return HostRows(group, backstop(timeout_s).total_seconds())


def _mapped(file: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)
