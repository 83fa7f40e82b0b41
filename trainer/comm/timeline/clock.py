"""Puts time stamps of several hosts on one clock."""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

_NUM_PINGS = 5
_PING_TAG = 2
_VALID_S = 10.0  # two clocks drift apart by at most some 50 microseconds a second


class CommonClock:
    """Translates `time.perf_counter` of every rank to rank 0's clock.

    The first rank of every other host compares its clock with rank 0's, by Cristian's method ("Probabilistic
    clock synchronization", 1989): the answer with the shortest round trip is wrong by at most half of it.
    Ranks of one host share its clock. All methods are collectives.

    Args:
        group: a gloo group of the ranks that compare; ranks are counted within it.
        hosts: host index of each rank.
    """

    def __init__(self, group: dist.ProcessGroup, hosts: Sequence[int]) -> None:
        self._group, self._rank = group, dist.get_rank(group)
        self._leader = [hosts.index(host) for host in hosts]  # by rank
        self._offset_s = 0.0  # to add to this rank's clock; right on leaders
        self._compared_s = float("-inf")  # when clocks were compared last, on rank 0's clock
        self._now_s = 0.0  # the latest known time of that clock, the same on all ranks

    def gather(self, stamps: Sequence[float]) -> torch.Tensor:
        """Each rank's stamps on rank 0's clock: (rank, stamp), float64 seconds."""
        if self._now_s - self._compared_s > _VALID_S:  # the same answer on all ranks
            self._compare()
            self._compared_s = self._now_s
        own = torch.tensor([time.perf_counter(), self._offset_s, *stamps], dtype=torch.float64)
        rows = torch.empty(len(self._leader), own.numel(), dtype=torch.float64)
        dist.all_gather(list(rows), own, group=self._group)
        self._now_s = float(rows[0, 0])
        return rows[:, 2:] + rows[self._leader, 1:2]

    def _compare(self) -> None:
        others = [rank for rank in dict.fromkeys(self._leader) if rank != 0]
        if self._rank == 0:
            for leader in others:
                self._answer(leader)
        elif self._rank in others:
            self._offset_s = self._ask()

    def _answer(self, peer: int) -> None:
        message = torch.zeros(1, dtype=torch.float64)
        for _ in range(_NUM_PINGS):
            self._group.recv([message], peer, _PING_TAG).wait()
            message[0] = time.perf_counter()
            self._group.send([message], peer, _PING_TAG).wait()

    def _ask(self) -> float:
        message = torch.zeros(1, dtype=torch.float64)
        best = (float("inf"), 0.0)
        for _ in range(_NUM_PINGS):
            asked = time.perf_counter()
            self._group.send([message], 0, _PING_TAG).wait()
            self._group.recv([message], 0, _PING_TAG).wait()
            answered = time.perf_counter()
            best = min(best, (answered - asked, float(message) - (asked + answered) / 2))
        return best[1]
