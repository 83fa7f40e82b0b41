"""Counts the bytes that schedules move: per rank, and over each host's link."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.comm.algorithms.schedule import Kind, Op, Phase, Schedule


@dataclass(frozen=True)
class Traffic:
    """Payload bytes of one collective; without the network's headers."""

    sent: list[int]  # by rank
    received: list[int]  # by rank
    host_sent: list[int]  # by host, to other hosts
    host_received: list[int]  # by host, from other hosts


def count_traffic(schedules: Sequence[Schedule], hosts: Sequence[int], numel: int, itemsize: int) -> Traffic:
    """The traffic of one bucket of `numel` elements, `itemsize` bytes each on the wire.

    schedules[r] and hosts[r] belong to rank r; host indices have no gaps.
    """
    traffic = Traffic([0] * len(hosts), [0] * len(hosts), [0] * (max(hosts) + 1), [0] * (max(hosts) + 1))
    for rank, schedule in enumerate(schedules):
        for op, elements in _moves(schedule, numel):
            crosses = hosts[rank] != hosts[op.peer]
            by_rank = traffic.sent if op.kind is Kind.SEND else traffic.received
            by_host = traffic.host_sent if op.kind is Kind.SEND else traffic.host_received
            by_rank[rank] += elements * itemsize
            by_host[hosts[rank]] += elements * itemsize * crosses
    return traffic


def _moves(schedule: Schedule, numel: int) -> Iterator[tuple[Op, int]]:
    """Each op of each phase with the elements it moves over all repetitions of the phase."""
    for phase in (*schedule.reduce, *schedule.gather):
        for op in phase.ops:
            yield op, phase_elements(schedule, phase, op, numel)


def phase_elements(schedule: Schedule, phase: Phase, op: Op, numel: int) -> int:
    """Elements that `op` moves in all the rounds of `phase`, without walking them.

    The chunk moves by its width each round, so it covers a contiguous stretch of the ring, which may wrap.
    """

    def elements(begin: int, end: int) -> int:
        return schedule.boundary(end, numel) - schedule.boundary(begin, numel)

    low, high = phase.ring
    if phase.repeat == 1:
        return elements(op.begin, op.end)
    turns, rest = divmod(phase.repeat * (op.end - op.begin), high - low)
    begin = low + (op.end - rest - low) % (high - low)
    wrapped = max(0, begin + rest - high)
    return (
        turns * elements(low, high) + elements(begin, begin + rest - wrapped) + elements(low, low + wrapped)
    )
