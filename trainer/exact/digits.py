"""Sums of losses, metrics, buffers and squared norms in integers, so that the order does not matter.

`trainer.exact.chunk_sums` represents each number of a gradient by one integer. The numbers in this module are
fewer and may have any magnitude, so each is split into digits in base 2**32, and the digits are added as
int64. Sums of numbers below 2**128, the range of fp32, are exact down to 2**-160. NaN, Inf and larger numbers
are counted, and make the sum NaN or Inf. Up to 2**31 numbers can be added.
"""

import math
from functools import cache

import torch
from torch import Tensor

_BASE = 2.0**32
_LOWEST = 2.0**-160  # the unit of the last digit
_NUM_DIGITS = 9
_BEYOND = _LOWEST * _BASE**_NUM_DIGITS


def to_digits(numbers: Tensor) -> Tensor:
    """Return the sum over the first dimension of `numbers` (n, ...) as integers (11, ...) that can be added.

    They are the sums of the 9 signed digits, highest first; the count of numbers that are not below 2**128;
    and the count of numbers that are not above -2**128. NaN is in both counts. All operations are exact. The
    digits of counted numbers are meaningless.
    """
    scaled = numbers.double() * _scales(numbers.device).view(-1, *[1] * numbers.ndim)
    parts, beyond = scaled[:-2].trunc_(), ~(scaled[-2:] < _BEYOND)
    return torch.cat([torch.sub(parts[1:], parts[:-1], alpha=_BASE), beyond]).long().sum(1)


def from_digits(sums: Tensor) -> Tensor:
    """Convert sums of `to_digits` (11, ...) to numbers (...), fp64."""
    weights = 1 / _scales(sums.device)[1:-2].view(-1, *[1] * (sums.ndim - 1))
    infinite = torch.where(sums[-2:] > 0, math.inf, 0.0)
    return (sums[:-2].double() * weights).sum(0) + infinite[0] - infinite[1]


@cache
def _scales(device: torch.device) -> Tensor:
    """Return factors (12,) that scale a number to each digit, and 1 and -1 for the range check."""
    digits = [1 / (_LOWEST * _BASE**number) for number in reversed(range(_NUM_DIGITS + 1))]
    return torch.tensor([*digits, 1.0, -1.0], dtype=torch.float64, device=device)
