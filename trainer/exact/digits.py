"""Sums of losses, metrics, buffers and squares as integers, which have the same bits in any order.

`trainer.exact.chunk_sums` adds each number of a gradient as one integer. These numbers are fewer, and of any
size, so each is cut into digits to the base 2**32, and each digit is added as an int64. Numbers below 2**128,
the range of fp32, add up without an error down to 2**-160. NaN, Inf and larger numbers are counted, and then
the sum is NaN or Inf. Up to 2**31 numbers may be added.
"""

import math
from functools import cache

import torch
from torch import Tensor

_BASE = 2.0**32
_LOWEST = 2.0**-160  # what the last digit counts
_NUM_DIGITS = 9
_BEYOND = _LOWEST * _BASE**_NUM_DIGITS


def to_digits(numbers: Tensor) -> Tensor:
    """The sum over the first dimension of `numbers` (n, ...), as integers (11, ...) to be added to others.

    These are the sums of the digits, the highest first, each with its number's sign; how many numbers are not
    below 2**128; and how many are not above -2**128: NaN is both. Each operation is exact; digits of what is
    counted mean nothing.
    """
    scaled = numbers.double() * _scales(numbers.device).view(-1, *[1] * numbers.ndim)
    parts, beyond = scaled[:-2].trunc_(), ~(scaled[-2:] < _BEYOND)
    return torch.cat([torch.sub(parts[1:], parts[:-1], alpha=_BASE), beyond]).long().sum(1)


def from_digits(sums: Tensor) -> Tensor:
    """The numbers (...), fp64, that sums of `to_digits` stand for."""
    weights = 1 / _scales(sums.device)[1:-2].view(-1, *[1] * (sums.ndim - 1))
    infinite = torch.where(sums[-2:] > 0, math.inf, 0.0)
    return (sums[:-2].double() * weights).sum(0) + infinite[0] - infinite[1]


@cache
def _scales(device: torch.device) -> Tensor:
    """Factors of a number: for its part above all digits, from each digit up; for itself and its negative."""
    digits = [1 / (_LOWEST * _BASE**number) for number in reversed(range(_NUM_DIGITS + 1))]
    return torch.tensor([*digits, 1.0, -1.0], dtype=torch.float64, device=device)
