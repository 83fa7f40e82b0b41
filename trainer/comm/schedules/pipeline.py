"""Cut a bucket into segments and interleave their rounds, so that links and memory work at the same time.

Every rank takes the visits of a bucket in the same order. At visit (segment, k) it completes what the
segment receives in round k - 1 and starts round k. A sweep visits each segment in flight once, oldest first,
and `width` more segments enter with every sweep: while a rank waits for one segment, the sends of the
others keep the links busy.
"""

from collections.abc import Iterator

SEGMENT_MB = 2.0  # MiB; smaller ones cost more processor time, larger ones leave links idle at either end
WIDTH = 2


def num_segments(numel: int, itemsize: int, segment_bytes: int) -> int:
    """Segments of at most `segment_bytes` on the wire that make up a bucket; 0 for an empty one."""
    return -(-numel * itemsize // segment_bytes)


def segment_bounds(numel: int, num_segments: int) -> list[tuple[int, int]]:
    """The elements [begin, end) of each of `num_segments` nearly equal segments."""
    return [(s * numel // num_segments, (s + 1) * numel // num_segments) for s in range(num_segments)]


def visits(num_segments: int, num_rounds: int, width: int) -> Iterator[tuple[int, int]]:
    """(segment, k) for k in 0..num_rounds and every segment, in the order that all ranks follow."""
    last_sweep = (num_segments - 1) // width + num_rounds
    for sweep in range(last_sweep + 1):
        oldest = max(0, (sweep - num_rounds) * width)
        newest = min(num_segments, (sweep + 1) * width)
        for segment in range(oldest, newest):
            yield segment, sweep - segment // width
