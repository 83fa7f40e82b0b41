"""Count the bytes that schedules move per rank and over each host's link."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.comm.algorithms.schedule import Kind, Op, Phase, Schedule


@dataclass(frozen=True)
class Traffic:
    """Payload bytes of one collective, without network headers."""

    sent: list[int]  # by rank
    received: list[int]  # by rank
    host_sent: list[int]  # by host, to other hosts
    host_received: list[int]  # by host, from other hosts


def count_traffic(schedules: Sequence[Schedule], hosts: Sequence[int], numel: int, itemsize: int) -> Traffic:
    """Return the traffic of one bucket of `numel` elements of `itemsize` bytes on the wire.

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
    """Yield each op of each phase, and the number of elements that it moves over the whole phase."""
    for phase in (*schedule.reduce, *schedule.gather):
        for op in phase.ops:
            yield op, phase_elements(schedule, phase, op, numel)


def phase_elements(schedule: Schedule, phase: Phase, op: Op, numel: int) -> int:
    """Return the number of elements that `op` moves in all rounds of `phase`, without iterating over them.

    The chunk moves by its width in each round, so it covers a contiguous part of the ring, possibly beyond
    its end and on from its start.
    """

    def elements(start: int, end: int) -> int:
        return schedule.boundary(end, numel) - schedule.boundary(start, numel)

    low, high = phase.ring
    if phase.repeat == 1:
        return elements(op.begin, op.end)
    turns, rest = divmod(phase.repeat * (op.end - op.begin), high - low)
    start = low + (op.end - rest - low) % (high - low)
    wrapped = max(0, start + rest - high)
    return (
        turns * elements(low, high) + elements(start, start + rest - wrapped) + elements(low, low + wrapped)
    )
