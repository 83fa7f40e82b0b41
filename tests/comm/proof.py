"""Simulate the schedules of all ranks without a network, and prove the all-reduce correct for any numbers.

A part is represented by the set of ranks whose values are in it. A schedule is correct if every message sent
is received in its round, no value is added twice, an owner's sum is complete, and every rank ends with the
sum of every part.
"""

from collections.abc import Sequence
from itertools import zip_longest

from trainer.comm.algorithms.schedule import Kind, Op, Schedule


class ScheduleError(ValueError):
    """The schedules do not compute the all-reduce; the message names round, rank and chunk."""


def simulate(schedules: Sequence[Schedule]) -> None:
    """Check the family of schedules, one per rank.

    Raises:
        ScheduleError: a message without its receive or the reverse (which would hang), a value added twice,
            or to what was sent, a sum copied twice, an incomplete sum, parts with two owners, or ranks that
            disagree on rounds or parts.
    """
    shapes = {(s.parts, s.num_reduce_rounds, s.num_rounds) for s in schedules}
    if len(shapes) != 1:
        raise ScheduleError(f"ranks disagree on (parts, reduce rounds, rounds): {sorted(shapes)}")
    parts, num_reduce_rounds, _ = shapes.pop()
    everyone = (1 << len(schedules)) - 1
    held = [[1 << rank] * parts for rank in range(len(schedules))]  # bit sets of ranks, by rank and part
    sent: list[set[int]] = [set() for _ in schedules]  # parts, by rank

    if num_reduce_rounds == 0:
        _check_owners(schedules, held, everyone)
    for number, ops in enumerate(zip_longest(*(s.rounds() for s in schedules), fillvalue=())):
        _run_round(number, ops, held, sent, everyone)
        if number + 1 == num_reduce_rounds:
            _check_owners(schedules, held, everyone)
    for rank, sums in enumerate(held):
        for part, ranks in enumerate(sums):
            if ranks != everyone:
                raise ScheduleError(
                    f"rank {rank} ends without the sum of part {part}: {_names(ranks)} are in it"
                )


def _run_round(
    number: int, ops: Sequence[Sequence[Op]], held: list[list[int]], sent: list[set[int]], everyone: int
) -> None:
    in_flight: dict[tuple[int, int], list[tuple[Op, list[int]]]] = {}
    for rank, rank_ops in enumerate(ops):
        for op in rank_ops:
            if op.kind is Kind.SEND:
                message = (op, held[rank][op.begin : op.end])
                in_flight.setdefault((rank, op.peer), []).append(message)
                sent[rank].update(range(op.begin, op.end))
    for rank, rank_ops in enumerate(ops):
        for op in rank_ops:
            if op.kind is Kind.SEND:
                continue
            where = f"round {number}: rank {rank}, parts [{op.begin}, {op.end}) from rank {op.peer}"
            queue = in_flight.get((op.peer, rank), [])
            if not queue:
                raise ScheduleError(f"{where}: it would wait forever, since nothing is sent")
            send, values = queue.pop(0)
            if (send.begin, send.end) != (op.begin, op.end):
                raise ScheduleError(f"{where}: parts [{send.begin}, {send.end}) are sent instead")
            if op.kind is Kind.ADD and not sent[rank].isdisjoint(range(op.begin, op.end)):
                raise ScheduleError(f"{where}: adds to what it has sent, which may not have been read")
            for part, ranks in zip(range(op.begin, op.end), values, strict=True):
                if op.kind is Kind.ADD and held[rank][part] & ranks:
                    twice = _names(held[rank][part] & ranks)
                    raise ScheduleError(f"{where}: the values of {twice} would be added twice")
                if op.kind is Kind.COPY and ranks != everyone:
                    raise ScheduleError(f"{where}: copies an unfinished sum of {_names(ranks)}")
                if op.kind is Kind.COPY and held[rank][part] == everyone:
                    raise ScheduleError(f"{where}: copies what it already holds")
                held[rank][part] = ranks if op.kind is Kind.COPY else held[rank][part] | ranks
    lost = [pair for pair, queue in in_flight.items() if queue]
    if lost:
        sender, receiver = lost[0]
        raise ScheduleError(f"round {number}: what rank {sender} sends to rank {receiver} is not received")


def _check_owners(schedules: Sequence[Schedule], held: list[list[int]], everyone: int) -> None:
    owners: dict[int, int] = {}
    for rank, schedule in enumerate(schedules):
        for part in range(*schedule.owned):
            if part in owners:
                raise ScheduleError(f"part {part} is owned by rank {owners[part]} and by rank {rank}")
            if held[rank][part] != everyone:
                raise ScheduleError(
                    f"rank {rank} owns part {part} with only {_names(held[rank][part])} in it"
                )
            owners[part] = rank
    if len(owners) != schedules[0].parts:
        raise ScheduleError(f"parts {sorted(set(range(schedules[0].parts)) - set(owners))} have no owner")


def _names(ranks: int) -> str:
    return "ranks " + ", ".join(str(rank) for rank in range(ranks.bit_length()) if ranks >> rank & 1)
