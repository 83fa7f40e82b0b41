"""Exchanges copies of shards between two hosts, in a thread, so that each host has the shards of both.

A received copy is whole once its step is written, which comes last. An exchange is over when all ranks of
both hosts have received: a rank that then replaces an older copy knows that this one is on both.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from queue import SimpleQueue

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.futures import Future

from trainer.checkpoint.copies import HEAD_BYTES, CopyMemory, head_of
from trainer.comm.transport.blame import PeerError
from trainer.comm.transport.gloo import RECEIVED, SENT, GlooLinks
from trainer.distributed.process_group import Dist

_CHUNK_BYTES = 1 << 26
_LOOK_S = 0.001


def receivers(holders: Sequence[int], hosts: Sequence[int]) -> dict[int, int]:
    """By rank of `holders`, which are on two hosts, the rank of the other host that keeps its copies."""
    one, other = ([rank for rank in holders if hosts[rank] == host] for host in {hosts[r] for r in holders})
    found: dict[int, int] = {}
    for here, there in ((one, other), (other, one)):
        found |= {rank: there[number % len(there)] for number, rank in enumerate(here)}
    return found


class CopyExchange:
    """This rank's part in the exchanges of `holders`, ranks of two hosts.

    Args:
        own: the copies that this rank makes.
        group: of `holders`, over gloo, without another user.
        timeout_s: the longest wait for one message.

    Attributes:
        received: the copies of ranks of the other host that this one keeps, by rank.
    """

    def __init__(
        self,
        dist: Dist,
        own: CopyMemory,
        holders: Sequence[int],
        group: torch_dist.ProcessGroup,
        timeout_s: float,
    ) -> None:
        receiver = receivers(holders, dist.hosts)
        self.received = {rank: CopyMemory() for rank, to in receiver.items() if to == dist.rank}
        self._dist, self._own, self._timeout_s, self._group = dist, own, timeout_s, group
        links = GlooLinks(group, timeout_s)
        self._target = links.to(torch_dist.get_group_rank(group, receiver[dist.rank]))
        self._sources = {rank: links.to(torch_dist.get_group_rank(group, rank)) for rank in self.received}
        self._tasks: SimpleQueue[tuple[int, int, Future[None]] | None] = SimpleQueue()
        self._last: Future[None] = Future()
        self._last.set_result(None)
        # A daemon: a thread that waits for a peer must not keep a failing process alive.
        self._thread = threading.Thread(target=self._work, name="copies", daemon=True)
        self._thread.start()

    def begin(self, number: int, step: int) -> None:
        """Exchange the copies of `step`, in slot `number`; called on all `holders`, after `wait`."""
        self._last = Future()
        self._tasks.put((number, step, self._last))

    def wait(self) -> None:
        """Wait until the last exchange is over.

        Raises:
            PeerError: a rank is gone, or silent for `timeout_s`.
            UserError: this host has no memory left for the copies of the other.
        """
        self._last.wait()

    def close(self) -> None:
        """End the thread, after the last exchange; called after a successful run."""
        self._tasks.put(None)
        self._thread.join(self._timeout_s)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            number, step, over = task
            try:
                self._exchange(number, step)
                torch_dist.barrier(self._group)
            except PeerError as error:
                peer = torch_dist.get_global_rank(self._group, error.peer)
                over.set_exception(PeerError(peer, error.reason))  # type: ignore[arg-type]
            except Exception as error:
                over.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong
            else:
                over.set_result(None)

    def _exchange(self, number: int, step: int) -> None:
        own = self._own.slot(number)
        self._await_device(own, step)
        _, begin, length = head_of(own).tolist()
        heads = {rank: torch.zeros(4, dtype=torch.int64) for rank in self._sources}
        self._move(torch.tensor([step, begin, length, len(own)]), heads)
        arriving = {}
        for rank, head in heads.items():
            its_step, begins, its_length, size = head.tolist()
            assert its_step == step, f"rank {rank} sends step {its_step}, not {step}"
            self.received[rank].make_room(size)
            slot = self.received[rank].slot(number)
            head_of(slot).copy_(torch.tensor([0, begins, its_length]))
            arriving[rank] = slot[HEAD_BYTES : begins + its_length]
        leaving = own[HEAD_BYTES : begin + length]
        most = max(map(len, (leaving, *arriving.values())))
        for at in range(0, most, _CHUNK_BYTES):
            chunk = slice(at, at + _CHUNK_BYTES)
            self._move(leaving[chunk], {rank: into[chunk] for rank, into in arriving.items()})
            self._dist.heartbeat.progress()
        for rank in arriving:
            head_of(self.received[rank].slot(number))[0] = step

    def _await_device(self, own: Tensor, step: int) -> None:
        """Wait until the copy is whole: a GPU makes it after all that was queued before."""
        deadline = time.monotonic() + self._timeout_s
        while head_of(own)[0] != step:
            if time.monotonic() > deadline:  # its stream waits for another rank
                words = f"{self._dist.device} has not finished step {step} after {self._timeout_s:g} s"
                raise torch_dist.DistBackendError(words)
            time.sleep(_LOOK_S)

    def _move(self, leaving: Tensor, arriving: Mapping[int, Tensor]) -> None:
        """Send `leaving`, and fill `arriving`, by rank; what is empty is neither sent nor awaited."""
        from_ranks = [(self._sources[rank], into) for rank, into in arriving.items() if len(into)]
        coming = [(link, link.receive(into, 0)) for link, into in from_ranks]
        if len(leaving):
            self._target.wait(self._target.send(leaving, 0), SENT)
        for link, work in coming:
            link.wait(work, RECEIVED)
