"""The messages of a bucket never wait in a cycle, for any number of ranks, in simulation and with processes.

Ranks are sequential and a finished wait stays finished, so the order in which ranks are simulated does not
matter: if one order reaches the end, every order does.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence

import pytest

from trainer.comm.algorithms.all_reduce import ALGORITHMS, Schedule, build
from trainer.comm.algorithms.pipeline import IN_FLIGHT, WIDTH
from trainer.comm.algorithms.program import chunks_in_flight, lay_out, messages_in_flight

Channel = tuple[int, int]  # (sender, receiver)


class Room:
    """The messages sent and read by all ranks, and the largest number of unread messages.

    A segment has one element per rank, so that a ring skips no message.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.sent: Counter[Channel] = Counter()
        self.read: Counter[Channel] = Counter()
        self.most_unread = 0

    def play(
        self, rank: int, schedule: Schedule, buckets: Sequence[int], num_slots: int, window: int
    ) -> Iterator[None]:
        """Simulate one rank for buckets with these numbers of elements, and yield where it must wait."""
        slots: deque[list[tuple[Channel, int]]] = deque([[]] * num_slots)  # each with its readers
        for numel in buckets:
            for visit in (v for sweep in lay_out(schedule, numel, 1, self.world_size, WIDTH) for v in sweep):
                for move in visit.receives:
                    channel = (move.peer, rank)
                    while self.sent[channel] == self.read[channel]:
                        yield
                    self.read[channel] += 1
                copies: dict[tuple[int, int], list[tuple[Channel, int]]] = {}
                for move in visit.sends:
                    channel, chunk = (rank, move.peer), (move.begin, move.end)
                    if chunk not in copies:
                        while not all(self.read[channel] >= number for channel, number in slots[0]):
                            yield
                        slots.popleft()
                        slots.append(copies.setdefault(chunk, []))
                    while self.sent[channel] - self.read[channel] >= window:
                        yield
                    self.sent[channel] += 1
                    self.most_unread = max(self.most_unread, self.sent[channel] - self.read[channel])
                    copies[chunk].append((channel, self.sent[channel]))


def ends(
    algorithm: str, hosts: list[int], buckets: Sequence[int], room: Room, num_slots: int = 0, window: int = 0
) -> bool:
    """Return whether all ranks finish; each runs as far as possible before the next one."""
    schedules = [build(algorithm, rank, hosts) for rank in range(len(hosts))]
    running = deque(
        room.play(
            rank,
            schedule,
            buckets,
            num_slots or chunks_in_flight(schedule, WIDTH),
            window or messages_in_flight(schedule),
        )
        for rank, schedule in enumerate(schedules)
    )
    while running:
        before = (room.sent.total(), room.read.total(), len(running))
        running = deque(way for way in running if next(way, 0) is None)
        if (room.sent.total(), room.read.total(), len(running)) == before:
            return False
    return True


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "hosts",
    [
        [0] * 2,
        [0] * 5,
        [0, 1, 0, 0, 1, 2],
        pytest.param([rank // 10 for rank in range(24)], marks=pytest.mark.slow),
    ],
    ids=lambda hosts: f"{len(hosts)}-on-{len(set(hosts))}",
)
def test_no_rank_waits_forever(algorithm: str, hosts: list[int]) -> None:
    room, segment = Room(len(hosts)), len(hosts)
    # A bucket of one element, an empty one, fewer elements than ranks, more segments than may be in flight.
    assert ends(algorithm, hosts, [1, 0, segment - 1, segment * (IN_FLIGHT + 3) + 1, 1, 2 * segment], room)
    assert room.sent == room.read
    assert room.most_unread <= IN_FLIGHT, "a socket is given room for as many"


@pytest.mark.slow
def test_smaller_windows_would_deadlock() -> None:
    ring, segment = [0] * 18, 18
    buckets = [segment * IN_FLIGHT]
    assert ends("ring", ring, buckets, Room(18), window=IN_FLIGHT)
    assert not ends("ring", ring, buckets, Room(18), window=IN_FLIGHT - 1)
    assert not ends("ring", ring, buckets, Room(18), num_slots=IN_FLIGHT - 1)
