"""Sums of numbers of any magnitude, as digits."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from trainer.exact.digits import from_digits, to_digits

MOST = math.nextafter(2.0**128, 0)


def _sum(numbers: Tensor) -> float:
    return from_digits(to_digits(numbers)).item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lowest", [-38, -3])
def test_any_order_and_grouping_gives_the_same_bits(dtype: torch.dtype, lowest: int) -> None:
    torch.manual_seed(0)
    numbers = (torch.randn(999, dtype=torch.float64) * 10.0 ** torch.randint(lowest, 37, (999,))).to(dtype)
    # Most of it cancels.
    numbers = torch.cat([numbers, -numbers[:-5]])
    whole = _sum(numbers)
    assert _sum(numbers.flip(0)) == whole
    groups = [to_digits(part) for part in numbers[torch.randperm(len(numbers))].split([3, 1000, 990])]
    assert from_digits(sum(groups[1:], groups[0])).item() == whole
    exact = float(sum(map(Fraction, numbers.tolist())))
    assert abs(whole - exact) <= 2.0**-51 * numbers.abs().max()
    numbers[numbers.abs().argmax()] *= 1 - 2.0**-6
    assert _sum(numbers) != whole


@pytest.mark.parametrize(
    "number", [0.0, 1.0, -3.0, 0.1, 1e-30, 1e30, MOST, -MOST, 2.0**-149, 2.0**53 - 1, 2.0**32, -(2.0**-32)]
)
def test_numbers_are_restored_bit_for_bit(number: float) -> None:
    assert _sum(torch.tensor([number], dtype=torch.float64)) == number
    assert _sum(torch.tensor([number, 1e38, -1e38, -number], dtype=torch.float64)) == 0
    assert _sum(torch.full((1000,), number, dtype=torch.float64)) == pytest.approx(1000 * number, rel=1e-15)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([math.nan], math.nan),
        ([math.inf], math.inf),
        ([-math.inf], -math.inf),
        ([2.0**128], math.inf),
        ([-1e300], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([1e39, math.nan], math.nan),
    ],
)
def test_non_finite_values_are_found_among_others(given: list[float], expected: float) -> None:
    for numbers in (given, [*given, 1e4], [-1e38, *given, 1e4]):
        assert _sum(torch.tensor(numbers, dtype=torch.float64)) == pytest.approx(expected, nan_ok=True)
