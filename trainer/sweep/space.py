"""What a sweep searches: the values of each swept setting of a command line."""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hydra.core.override_parser.types import IntervalSweep, Override

from trainer.errors import UserError


@dataclass(frozen=True)
class Choice:
    """A list, choice(), glob() or, `ordered`, a range(); values as on a command line."""

    key: str
    values: tuple[str, ...]
    ordered: bool


@dataclass(frozen=True)
class Interval:
    """interval(low, high), of integers if both are: int(interval(1, 8)); log by tag(log, ...)."""

    key: str
    low: float
    high: float
    log: bool


Setting = Choice | Interval


def split(overrides: Iterable[Override]) -> tuple[list[str], list[Setting]]:
    """Split a command line into the overrides common to all trials, and the swept settings.

    Raises:
        UserError: a swept setting without values.
    """
    fixed: list[str] = []
    swept: list[Setting] = []
    for override in overrides:
        key = override.get_key_element()
        if not override.is_sweep_override():
            assert override.input_line is not None
            fixed.append(override.input_line)
        elif override.is_interval_sweep():
            swept.append(_interval(key, override))
        else:
            values = tuple(dict.fromkeys(override.sweep_string_iterator()))
            if not values:
                raise UserError(f"{override.input_line} leaves no value for {key}")
            swept.append(Choice(key, values, ordered=override.is_range_sweep()))
    return fixed, swept


def grid(settings: Iterable[Setting]) -> Iterator[list[str]]:
    """Every combination, the last setting changing first.

    Raises:
        UserError: an interval, which has no grid.
    """
    axes = []
    for setting in settings:
        if isinstance(setting, Interval):
            raise UserError(
                f"{setting.key}=interval(...) has no grid: use range() or a list, or "
                "hydra.sweeper.search=random or tpe"
            )
        axes.append([f"{setting.key}={value}" for value in setting.values])
    return map(list, itertools.product(*axes))


def _interval(key: str, override: Override) -> Interval:
    interval = override.value()
    assert isinstance(interval, IntervalSweep) and interval.start is not None and interval.end is not None
    low, high, log = interval.start, interval.end, "log" in interval.tags
    if unknown := interval.tags - {"log"}:
        raise UserError(f"{override.input_line} is tagged {', '.join(sorted(unknown))}; the only tag is log")
    if not (math.isfinite(low) and math.isfinite(high) and low < high) or (log and low <= 0):
        raise UserError(
            f"{override.input_line} must go from a number to a larger one" + ", both above 0" * log
        )
    return Interval(key, low, high, log)
