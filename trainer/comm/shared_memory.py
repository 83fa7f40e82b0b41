"""Send messages between processes on a host through shared memory; see docs/shared-memory.md.

Each rank has slots of memory, which its peers have mapped. To send a chunk, a rank copies it to the next slot
and sends the slot's offset to its peers over a socket; they read the chunk from there and acknowledge it. The
slots are few, so that they stay in the CPU cache. The memory has no name (memfd), so nothing remains when a
process dies, and /dev/shm may be small. A dead peer is noticed at once, because its socket closes.

There are no deadlocks in combination with the waits of executor.py. Before a rank sends, the peers must have
read the chunk in the next slot, and the window of each peer, a number of unread messages, must not be full.
Slots and windows have room for all messages that are received after visit p, because only `IN_FLIGHT`
segments are in flight, each with the messages of one round. So a wait for room, before a send of visit p,
ends when a peer receives a message at visit p or before. A visit's receives come before its sends, so this
wait, too, is for something earlier. No send blocks in the kernel: a socket has room for the messages of one
window and for the acknowledgements of another.
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
_OFFSET = struct.Struct("=Q")  # the first byte of a chunk in its sender's memory
_READ = (1 << 64) - 1  # instead of an offset: acknowledges the oldest unread message
_PACKET_ROOM = 1024  # bytes that Linux charges for such a short packet (768), rounded up
_TIMEVAL = struct.Struct("@ll")
_CREDENTIALS = struct.Struct("@iII")  # process, user, group


class SharedMemory:
    """The messages between this rank and its peers on the same host (a collective of `group`).

    Args:
        segment_bytes, width: see `trainer.comm.algorithms.pipeline`.

    Attributes:
        peers: the ranks with which this rank shares memory.
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
        # For each slot, its readers: the peer, and the number of the message among all messages to that peer.
        self._readers: list[list[tuple[int, int]]] = [[] for _ in self._slots]
        rank = dist.get_rank(group)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.settimeout(timeout_s)
            listener.bind("")  # an abstract address, since a path in TMPDIR may be too long for a socket
            listener.listen(len(hosts))
            gathered = gather_objects((listener.getsockname(), self._window), group)
            self.peers = {peer for peer in schedule.peers(*Kind) if hosts[peer] == hosts[rank]}
            self._sockets, files = self._connected(rank, [address for address, _ in gathered], listener, file)
        for connection in self._sockets.values():
            self._prepare(connection, 2 * max(window for _, window in gathered))
        self._memory = {peer: _mapped(peer_file) for peer, peer_file in files.items()}
        for mapped in (file, *files.values()):
            os.close(mapped)
        self._arrived = {peer: deque[int]() for peer in self.peers}
        self._sent, self._read = Counter[int](), Counter[int]()  # messages to each peer; how many it has read

    def send(self, moves: Sequence[Move], sums: Tensor, wire: torch.dtype) -> None:
        """Send chunks of `sums` in dtype `wire`; a chunk for several peers is copied to memory once."""
        copies: dict[tuple[int, int], int] = {}
        for move in moves:
            if (chunk := (move.begin, move.end)) not in copies:
                slot = copies[chunk] = self._free_slot()
                self._slots[slot][: move.numel * wire.itemsize].view(wire).copy_(move.chunk(sums))
            slot = copies[chunk]
            self._wait_until_read(move.peer, self._sent[move.peer] + 1 - self._window)
            self._notify(move.peer, slot * len(self._slots[0]))
            self._sent[move.peer] += 1
            self._readers[slot].append((move.peer, self._sent[move.peer]))

    def receive(self, move: Move, sums: Tensor, wire: torch.dtype) -> None:
        """Wait for the next message of the peer, and add it to `sums` or copy it there."""
        while not self._arrived[move.peer]:
            self._read_socket(move.peer)
        begin = self._arrived[move.peer].popleft()
        move.take(sums, self._memory[move.peer][begin : begin + move.numel * wire.itemsize].view(wire))
        self._notify(move.peer, _READ)

    def close(self) -> None:
        """Disconnect after all peers have read all messages."""
        for peer in self.peers:
            self._wait_until_read(peer, self._sent[peer])
        for connection in self._sockets.values():
            connection.close()

    def _free_slot(self) -> int:
        slot = self._next_slot
        self._next_slot = (slot + 1) % len(self._slots)
        for reader in self._readers[slot]:
            self._wait_until_read(*reader)
        self._readers[slot].clear()
        return slot

    def _wait_until_read(self, peer: int, number: int) -> None:
        while self._read[peer] < number:
            self._read_socket(peer)

    def _notify(self, peer: int, offset: int) -> None:
        try:
            self._sockets[peer].send(_OFFSET.pack(offset), socket.MSG_NOSIGNAL)
        except OSError as error:
            raise self._lost(peer, error) from error

    def _read_socket(self, peer: int) -> None:
        try:
            if not (packets := self._sockets[peer].recv(64 * _OFFSET.size)):
                raise ConnectionResetError("it has closed its connection")
        except OSError as error:
            raise self._lost(peer, error) from error
        for (offset,) in _OFFSET.iter_unpack(packets):
            if offset == _READ:
                self._read[peer] += 1
            else:
                self._arrived[peer].append(offset)

    def _lost(self, peer: int, error: OSError) -> dist.DistNetworkError:
        """Return a torch.distributed error, so that failures/watch.py searches all ranks for its cause."""
        if isinstance(error, BlockingIOError | TimeoutError):  # the timeout of the socket
            return dist.DistNetworkError(f"rank {peer} did not answer within {self._timeout_s:g} s")
        return dist.DistNetworkError(f"lost the connection to rank {peer}: {error.strerror or error}")

    def _connected(
        self, rank: int, addresses: Sequence[bytes], listener: socket.socket, own: int
    ) -> tuple[dict[int, socket.socket], dict[int, int]]:
        """Return a socket and a memory file for each peer; the lower rank connects and sends first."""
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
        """Make room for a number of packets in a socket, and set its timeouts.

        The timeouts are socket options, because Python's `settimeout` adds a system call to every send and
        receive.
        """
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < packets * _PACKET_ROOM:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, packets * _PACKET_ROOM)
        seconds, fraction = divmod(self._timeout_s, 1.0)
        timeout = _TIMEVAL.pack(int(seconds), max(1, int(fraction * 1e6)))  # 0 would mean no timeout
        connection.setblocking(True)
        for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, direction, timeout)


class HostRows:
    """An all-gather of one row from each rank on a host: `send` returns at once, `receive` waits.

    Each rank sends its row to all others, without a thread. Between two ranks, this takes a tenth of the CPU
    time of gloo's all-reduce.
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
        """Send `row`, at most 4 KiB, whose shape and dtype are the same on all ranks."""
        self._rows = row.new_empty(self._size, *row.shape)
        self._rows[self._rank] = row
        self._memory.send(self._moves(Kind.SEND), self._rows.view(-1), row.dtype)

    def receive(self) -> Tensor:
        """Return the rows of the last `send`, (ranks, *row.shape), the same on all ranks.

        Raises:
            DistNetworkError: a peer has died, or did not answer within `timeout_s`.
        """
        for move in self._moves(Kind.COPY):
            self._memory.receive(move, self._rows.view(-1), self._rows.dtype)
        return self._rows

    def _moves(self, kind: Kind) -> list[Move]:
        width = self._rows[0].numel()
        rows = ((peer, self._rank if kind is Kind.SEND else peer) for peer in self._others)
        return [Move(kind, peer, row * width, (row + 1) * width) for peer, row in rows]

    def close(self) -> None:
        self._memory.close()


def rows_of_host(ranks: Ranks, timeout_s: float) -> HostRows | None:
    """Return a `HostRows` if all ranks are on the CPUs of one host, otherwise None (a collective)."""
    group, on_cpus = dist.group.WORLD, ranks.device.type == "cpu"
    if ranks.world_size == 1 or not on_cpus or group is None or ranks.num_hosts > 1:
        return None
    return HostRows(group, backstop(timeout_s).total_seconds())


def _mapped(file: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)
