"""Divide a bucket into segments and interleave their rounds, so that links and memory work at the same time.

Every rank visits the segments of a bucket in the same order. Visit (segment, k) completes the receives of
round k - 1 and starts round k. A sweep visits each segment in flight once, oldest first, and `width` more
segments enter with every sweep, up to `IN_FLIGHT`. While a rank waits for one segment, the sends of the other
segments keep the links busy.
"""

from collections.abc import Iterator

SEGMENT_MB = 2.0  # MiB; smaller segments cost more CPU time, larger ones leave links idle at start and end
WIDTH = 2
IN_FLIGHT = 32  # segments; limits the unread messages, for any number of rounds


def num_segments(numel: int, itemsize: int, segment_bytes: int) -> int:
    """Return the number of segments of at most `segment_bytes` on the wire; 0 for an empty bucket."""
    return -(-numel * itemsize // segment_bytes)


def segment_bounds(numel: int, num_segments: int) -> list[tuple[int, int]]:
    """Return the elements [begin, end) of each of `num_segments` segments of nearly equal size."""
    return [(s * numel // num_segments, (s + 1) * numel // num_segments) for s in range(num_segments)]


def first_sweep(segment: int, num_rounds: int, width: int) -> int:
    """Return the sweep that first visits `segment`, after the last visit of segment `segment - IN_FLIGHT`."""
    turn, position = divmod(segment, IN_FLIGHT)
    return turn * max(-(-IN_FLIGHT // width), num_rounds + 1) + position // width


def sweeps(num_segments: int, num_rounds: int, width: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the visits (segment, k), k in 0..num_rounds, of each sweep, in the same order on all ranks."""
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
