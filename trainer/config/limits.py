"""Limits of settings: each field of the schema declares its limit, and `check_limits` checks them all."""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from trainer.errors import UserError


@dataclass(frozen=True)
class Limit:
    """A condition on a value, and its description. None, for an unset value, always satisfies it."""

    is_valid: Callable[[Any], bool]
    description: str

    def check(self, name: str, value: Any) -> None:
        if value is not None and not self.is_valid(value):
            raise UserError(f"{name} is {value if value != '' else 'empty'}, but must be {self.description}")


def limited(is_valid: Callable[[Any], bool], description: str, default: Any = MISSING) -> Any:
    return field(default=default, metadata={"limit": Limit(is_valid, description)})


def at_least(limit: float) -> Any:
    return limited(lambda value: value >= limit, f"at least {limit}")


def count_or_never() -> Any:
    """Declare a count for which 0 means never, and null means 0."""
    limit = Limit(lambda value: value >= 0, "at least 0")
    return field(default=MISSING, metadata={"limit": limit, "null": 0})


def above(limit: float) -> Any:
    return limited(lambda value: value > limit, f"greater than {limit}")


def one_of(*values: str, default: str = MISSING) -> Any:
    return limited(lambda value: value in values, f"one of {', '.join(values)}", default)


def matching(pattern: str, description: str, default: Any = MISSING) -> Any:
    return limited(lambda value: re.fullmatch(pattern, value) is not None, description, default)


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


PATTERN = Limit(_is_pattern, "a regular expression of parameter names")


def seconds() -> Any:
    """Declare a timeout. The maximum fits in the 64-bit nanoseconds of torch and the C library."""
    return limited(lambda value: 0 < value <= 1e9, "greater than 0, and at most 1e9 (30 years)")


PRECISIONS = ("fp32", "bf16", "fp16")


def check_limits(node: Any, prefix: str = "") -> None:
    """Check every setting of the dataclass `node` against the limit of its field."""
    for setting in dataclasses.fields(node):
        name, value = prefix + setting.name.rstrip("_"), getattr(node, setting.name)
        if dataclasses.is_dataclass(value):
            check_limits(value, f"{name}.")
        elif "limit" in setting.metadata:
            setting.metadata["limit"].check(name, value)
