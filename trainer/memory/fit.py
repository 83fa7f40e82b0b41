"""The largest micro-batch that fits, found with few tries."""

import functools
from collections.abc import Callable

MOST = 1 << 16  # samples; nobody asks for more at a time


def largest_micro_size(peak: Callable[[int], int], budget: int, first: int) -> int:
    """The largest size whose peak is within `budget` bytes; 0 if there is none, at most MOST.

    A peak is the largest of several straight lines, since what lies in it grows with the size or not at all.
    So the line on which the size `first` lies ends at the answer or beyond it; and from there Newton's method
    comes down line by line, and never passes the answer.

    Args:
        peak: bytes by micro-batch size; each call costs a rehearsal.
        first: a size to begin with, at least 1.
    """
    peak = functools.cache(peak)
    size = first
    if peak(first) <= budget:
        per_sample = peak(first + 1) - peak(first)
        size = min(MOST, first + (budget - peak(first)) // per_sample) if per_sample > 0 else MOST
    while (over := peak(size) - budget) > 0:
        if size == 1:
            return 0
        per_sample = peak(size) - peak(size - 1)
        size = max(1, size - -(-over // per_sample)) if per_sample > 0 else size // 2
    return size
