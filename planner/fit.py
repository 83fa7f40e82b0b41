"""Finds the largest micro-batch that fits, with few tries."""

import functools
from collections.abc import Callable

MOST = 1 << 16  # samples; an upper limit for the search


def largest_micro_batch_size(peak: Callable[[int], int], budget: int, first: int) -> int:
    """The largest size whose peak is within `budget` bytes; 0 if there is none, at most MOST.

    The peak is a maximum of straight lines, since each part of it grows linearly with the size or not at all.
    So the line through the size `first` reaches the budget at the answer or beyond it; from there Newton's
    method descends line by line, and never passes the answer.

    Args:
        peak: bytes by micro-batch size; each call simulates a step.
        first: a size to start with, at least 1.
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
