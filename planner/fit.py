"""Find the largest micro-batch that fits in memory while simulating few steps."""

import functools
from collections.abc import Callable

MOST = 1 << 16  # samples; the upper limit of the search


def largest_micro_batch_size(peak: Callable[[int], int], budget: int, first: int) -> int:
    """Return the largest size whose peak is within `budget` bytes, at most MOST; 0 if there is none.

    The peak is a maximum of straight lines, because each part of it is constant or grows linearly with the
    size. So the line through the peak at `first` reaches the budget at the answer or at a larger size. From
    there, Newton's method descends line by line, and cannot go below the answer.

    Args:
        peak: returns the peak in bytes for a micro-batch size; each call simulates a step.
        budget: available memory in bytes.
        first: the size to start with, at least 1.
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
