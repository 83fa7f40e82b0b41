"""Put time stamps of several hosts on one clock."""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

_NUM_PINGS = 5
_PING_TAG = 2


def to_common_clock(stamps: Sequence[float], hosts: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Gather each rank's `time.perf_counter` stamps, on rank 0's clock: (rank, stamp), float64 seconds.

    A collective. The first rank of every other host compares its clock with rank 0's by Cristian's method
    ("Probabilistic clock synchronization", 1989): the answer with the shortest round trip is wrong by at most
    half of it. That is done anew each time, because two crystals part by milliseconds within a minute.
    """
    rank = dist.get_rank(group)
    leaders = {host: hosts.index(host) for host in dict.fromkeys(hosts)}
    offset = 0.0
    if rank == 0:
        for leader in leaders.values():
            if leader != 0:
                _answer(leader, group)
    elif rank in leaders.values():
        offset = _ask(group)
    own = torch.tensor([offset, *stamps], dtype=torch.float64)
    gathered = torch.empty(len(hosts), own.numel(), dtype=torch.float64)
    dist.all_gather(list(gathered), own, group=group)
    offsets = torch.stack([gathered[leaders[host], 0] for host in hosts])
    return gathered[:, 1:] + offsets[:, None]


def _answer(peer: int, group: dist.ProcessGroup) -> None:
    message = torch.zeros(1, dtype=torch.float64)
    for _ in range(_NUM_PINGS):
        group.recv([message], peer, _PING_TAG).wait()
        message[0] = time.perf_counter()
        group.send([message], peer, _PING_TAG).wait()


def _ask(group: dist.ProcessGroup) -> float:
    """Seconds to add to this rank's clock to get rank 0's."""
    message = torch.zeros(1, dtype=torch.float64)
    best = (float("inf"), 0.0)
    for _ in range(_NUM_PINGS):
        asked = time.perf_counter()
        group.send([message], 0, _PING_TAG).wait()
        group.recv([message], 0, _PING_TAG).wait()
        answered = time.perf_counter()
        best = min(best, (answered - asked, float(message) - (asked + answered) / 2))
    return best[1]
