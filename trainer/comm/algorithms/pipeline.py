"""Cuts a bucket into segments and interleaves their rounds, so that links and memory work at the same time.

Every rank makes the visits of a bucket in the same order. Visit (segment, k) completes what the segment
receives in round k - 1 and starts round k. A sweep visits each segment in flight once, oldest first, and
`width` more segments enter with every sweep, up to `IN_FLIGHT`: while a rank waits for one segment, the
sends of the others keep the links busy.
"""

from collections.abc import Iterator

SEGMENT_MB = 2.0  # MiB; smaller ones cost more CPU time, larger ones leave links idle at either end
WIDTH = 2
IN_FLIGHT = 32  # segments; limits the unread messages, for any number of rounds


def num_segments(numel: int, itemsize: int, segment_bytes: int) -> int:
    """Segments of at most `segment_bytes` on the wire that make up a bucket; 0 for an empty one."""
    return -(-numel * itemsize // segment_bytes)


def segment_bounds(numel: int, num_segments: int) -> list[tuple[int, int]]:
    """The elements [begin, end) of each of `num_segments` nearly equal segments."""
    return [(s * numel // num_segments, (s + 1) * numel // num_segments) for s in range(num_segments)]


def first_sweep(segment: int, num_rounds: int, width: int) -> int:
    """The sweep with which `segment` enters: after all visits of the segment `IN_FLIGHT` before it."""
    turn, position = divmod(segment, IN_FLIGHT)
    return turn * max(-(-IN_FLIGHT // width), num_rounds + 1) + position // width


def sweeps(num_segments: int, num_rounds: int, width: int) -> Iterator[list[tuple[int, int]]]:
    """The visits (segment, k), k in 0..num_rounds, in the order that all ranks follow, sweep by sweep."""
    in_flight: list[int] = []
    entered = sweep = 0
    while in_flight or entered < num_segments:
        while entered < num_segments and first_sweep(entered, num_rounds, width) == sweep:
            in_flight.append(entered)
            entered += 1
        visits = [(segment, sweep - first_sweep(segment, num_rounds, width)) for segment in in_flight]
        yield visits
        in_flight = [segment for segment, k in visits if k < num_rounds]
        sweep += 1
