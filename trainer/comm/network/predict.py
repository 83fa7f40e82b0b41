"""Predict how long an all-reduce takes, from its schedules and from what links and processors can do.

The model is LogGP (Alexandrov et al., "LogGP: incorporating long messages into the LogP model", SPAA 1995)
with two kinds of links and one more resource. A bucket travels in segments that overlap, so its time is that
of the first segment through all rounds, and for each further one that of the busiest resource: a host's link
in either direction, a process's own thread, or the processors that the processes of a host share.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np

from trainer.comm.schedules.algorithms import Kind, Phase, Schedule
from trainer.comm.schedules.pipeline import SEGMENT_MB, WIDTH, first_sweep
from trainer.comm.schedules.traffic import Traffic, count_traffic


@dataclass(frozen=True)
class Machine:
    """What the hosts, all alike, and the network between them can do. Seconds are of one processor."""

    latency_s: float = 0.0  # of a message between hosts, one way
    link_bytes_per_s: float = math.inf  # of each host's link, in each direction, shared by its processes
    local_latency_s: float = 0.0
    local_bytes_per_s: float = math.inf  # of one process to others of its host, in each direction
    local_copy_s_per_byte: float = 0.0  # what sender and receiver each spend on data for their own host
    add_s_per_byte: float = 0.0
    network_s_per_byte: float = 0.0  # sent or received between hosts
    message_s: float = 0.0  # what sender and receiver each spend on a message
    parallelism: float = math.inf  # processors that a host has for its processes


def measured(figures: Mapping[str, Any]) -> dict[str, float]:
    """Fields of a Machine from what `trainer.comm.preflight --json` wrote: medians over all links.

    A preflight on one host leaves out the links between hosts, one process per host those within.

    Raises:
        ValueError: the preflight failed.
    """
    if not figures["passed"]:
        raise ValueError("this preflight failed; its figures mean nothing")
    found = {name: value for name, value in figures["costs"].items() if name != "copy_s_per_byte"}
    # On CPUs the processes of a host share memory and copy; on GPUs NCCL moves data over a link.
    on_cpu = figures["backend"].endswith("cpu")
    if on_cpu:
        found["local_copy_s_per_byte"] = figures["costs"]["copy_s_per_byte"]
    for prefix, same_host in (("local_", True), ("", False)):
        links = [link for link in figures["links"] if (link["source"] == link["target"]) is same_host]
        if links:
            bytes_per_s = float(np.median([link["gbit_s"] for link in links])) / 8e-9
            found[f"{prefix}latency_s"] = float(np.median([link["latency_us"] for link in links])) * 1e-6
            found["local_bytes_per_s" if same_host else "link_bytes_per_s"] = bytes_per_s
    if on_cpu:
        found.pop("local_bytes_per_s", None)  # of gloo's sockets, which nothing takes within a host
    return found


@dataclass(frozen=True)
class Prediction:
    seconds: float
    bottleneck: str  # the resource that the segments queue for; "latency" where they do not
    traffic: Traffic


@dataclass(frozen=True)
class _Round:
    """All messages of one round, one array element each, in the order of senders."""

    repeat: int
    source: np.ndarray
    target: np.ndarray
    share: np.ndarray  # of the bucket
    fresh: np.ndarray  # not a chunk that its sender has just put in place for another receiver
    send_turn: np.ndarray  # this message is the sender's n-th of the round
    adds: np.ndarray
    receive_turn: np.ndarray


def predict(
    schedules: Sequence[Schedule],
    hosts: Sequence[int],
    machine: Machine,
    num_bytes: int,
    itemsize: int = 4,
    segment_bytes: int = int(SEGMENT_MB * 2**20),
    width: int = WIDTH,
) -> Prediction:
    """The time of one all-reduce that starts at the same moment on all ranks.

    Args:
        schedules: one per rank.
        hosts: index of the host of every rank, without gaps.
        num_bytes: of the bucket, as it travels.
        itemsize: bytes of an element on the wire.
        segment_bytes, width: see `trainer.comm.schedules.pipeline`.
    """
    traffic = count_traffic(schedules, hosts, num_bytes // itemsize, itemsize)
    num_segments = max(1, -(-num_bytes // segment_bytes))
    segment = num_bytes / num_segments
    tally = _Tally(np.asarray(hosts), machine, segment, itemsize)
    for round_ in _rounds(schedules):
        tally.play(round_)
    loads = tally.loads()
    # The last segment enters after so many rounds of the first.
    behind = max((num_segments - 1) / width, first_sweep(num_segments - 1, schedules[0].num_rounds, width))
    loads["latency"] = tally.slowest_round_s * behind / max(1, num_segments - 1)
    bottleneck = max(loads, key=loads.__getitem__)
    seconds = tally.clocks.max() + (num_segments - 1) * loads[bottleneck]
    return Prediction(float(seconds), bottleneck if num_segments > 1 else "latency", traffic)


class _Tally:
    """One segment on its way: the clock of every rank, and the work done by each resource."""

    def __init__(self, hosts: np.ndarray, machine: Machine, segment: float, itemsize: int) -> None:
        self._hosts, self._machine, self._segment, self._itemsize = hosts, machine, segment, itemsize
        self._num_hosts = int(hosts.max()) + 1
        self.clocks = np.zeros(len(hosts))
        self.slowest_round_s = 0.0
        self._work_s = np.zeros(len(hosts))  # of each rank's thread
        self._local = np.zeros((2, len(hosts)))  # bytes sent and received inside a host, by rank
        self._across = np.zeros((2, self._num_hosts))  # bytes out of and into each host

    def loads(self) -> dict[str, float]:
        """Seconds that the busiest resource of each kind is busy with one segment."""
        machine = self._machine
        by_host = np.bincount(self._hosts, self._work_s, self._num_hosts)
        by_host += self._across.sum(0) * machine.network_s_per_byte
        return {
            "link between hosts": self._across.max() / machine.link_bytes_per_s,
            "link within a host": self._local.max() / machine.local_bytes_per_s,
            "one process": self._work_s.max(),
            "processors of a host": by_host.max() / machine.parallelism,
        }

    def play(self, round_: _Round) -> None:
        """Advance all clocks by `round_.repeat` rounds like this one."""
        machine, hosts, ranks = self._machine, self._hosts, len(self._hosts)
        source, target, num_bytes = round_.source, round_.target, round_.share * self._segment
        local = hosts[source] == hosts[target]
        # A chunk of less than one element is a message only now and then.
        message_s = machine.message_s * np.minimum(1.0, num_bytes / self._itemsize)
        copy_s = np.where(local, num_bytes * machine.local_copy_s_per_byte, 0.0)
        send_s = message_s + np.where(round_.fresh, copy_s, 0.0)
        receive_s = message_s + np.where(round_.adds, num_bytes * machine.add_s_per_byte, copy_s)
        work_s = np.bincount(source, send_s, ranks) + np.bincount(target, receive_s, ranks)

        across = np.where(local, 0.0, num_bytes)
        link = np.stack([np.bincount(hosts[end], across, self._num_hosts) for end in (source, target)])
        inside = np.stack([np.bincount(end, num_bytes - across, ranks) for end in (source, target)])
        transfer_s = np.where(
            local,
            machine.local_latency_s
            + np.maximum(inside[0][source], inside[1][target]) / machine.local_bytes_per_s,
            machine.latency_s
            + np.maximum(link[0][hosts[source]], link[1][hosts[target]]) / machine.link_bytes_per_s,
        )
        self._work_s += round_.repeat * work_s
        self._local += round_.repeat * inside
        self._across += round_.repeat * link

        # More busy processes than processors: each is slowed down.
        busy = np.bincount(hosts[work_s > 0], minlength=self._num_hosts)
        slowdown = np.maximum(1.0, busy / machine.parallelism)
        send_s *= slowdown[hosts[source]]
        receive_s *= slowdown[hosts[target]]
        sends = [(source[t], send_s[t], transfer_s[t], t) for t in _turns(round_.send_turn)]
        receipts = [(target[t], receive_s[t], t) for t in _turns(round_.receive_turn)]
        clocks, arrival = self.clocks, np.empty(len(source))
        before = clocks.max()
        for _ in range(round_.repeat):
            for who, duration, transfer, messages in sends:
                gone = clocks[who] + duration
                clocks[who] = gone
                arrival[messages] = gone + transfer
            for who, duration, messages in receipts:
                clocks[who] = np.maximum(clocks[who], arrival[messages]) + duration
            after = clocks.max()
            self.slowest_round_s, before = max(self.slowest_round_s, after - before), after


def _turns(turn: np.ndarray) -> list[np.ndarray]:
    """Indices of the messages of each turn: within one, no rank occurs twice."""
    order = np.argsort(turn, kind="stable")
    return np.split(order, np.cumsum(np.bincount(turn))[:-1]) if len(turn) else []


def _rounds(schedules: Sequence[Schedule]) -> Iterator[_Round]:
    """All ranks' rounds side by side; equal rounds in a row are given once, with their number."""
    phases = [(*schedule.reduce, *schedule.gather) for schedule in schedules]
    ends = [list(accumulate(phase.repeat for phase in own)) for own in phases]
    current = [0] * len(phases)
    begin = 0
    for cut in sorted(set(chain.from_iterable(ends))):
        yield _messages(schedules, [own[i] for own, i in zip(phases, current, strict=True)], cut - begin)
        begin = cut
        current = [i + (end[i] == cut) for i, end in zip(current, ends, strict=True)]


def _messages(schedules: Sequence[Schedule], phases: Sequence[Phase], repeat: int) -> _Round:
    """Join every send with its receive; a pair's messages are received in the order they are sent."""
    sends: list[tuple[int, int, float, bool, int]] = []
    receipts: dict[tuple[int, int], list[tuple[bool, int]]] = {}
    for rank, phase in enumerate(phases):
        num_sent = num_received = 0
        put = None
        for op in phase.ops:
            if op.kind is Kind.SEND:
                chunk = (op.begin, op.end)
                share = (op.end - op.begin) / schedules[rank].parts
                sends.append((rank, op.peer, share, chunk != put, num_sent))
                num_sent, put = num_sent + 1, chunk
            else:
                receipts.setdefault((op.peer, rank), []).append((op.kind is Kind.ADD, num_received))
                num_received += 1
    received = [receipts[source, target].pop(0) for source, target, *_ in sends]
    rows = [send + receipt for send, receipt in zip(sends, received, strict=True)]
    columns = list(zip(*rows, strict=True)) if rows else [()] * 7
    kinds = (np.intp, np.intp, np.float64, bool, np.intp, bool, np.intp)
    return _Round(repeat, *(np.array(column, kind) for column, kind in zip(columns, kinds, strict=True)))
