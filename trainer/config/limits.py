"""The limit of a setting, written beside its field, and its check."""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from trainer.errors import UserError


@dataclass(frozen=True)
class Limit:
    """What a value must satisfy, unless it is None, which means absent."""

    holds: Callable[[Any], bool]
    words: str

    def check(self, name: str, value: Any) -> None:
        if value is not None and not self.holds(value):
            raise UserError(f"{name} is {value if value != '' else 'empty'}, but must be {self.words}")


def limited(holds: Callable[[Any], bool], words: str, default: Any = MISSING) -> Any:
    return field(default=default, metadata={"limit": Limit(holds, words)})


def at_least(limit: float) -> Any:
    return limited(lambda value: value >= limit, f"at least {limit}")


def count_or_never() -> Any:
    """A count, of which 0 means never; null, which can mean nothing else, becomes 0."""
    limit = Limit(lambda value: value >= 0, "at least 0")
    return field(default=MISSING, metadata={"limit": limit, "null": 0})


def above(limit: float) -> Any:
    return limited(lambda value: value > limit, f"greater than {limit}")


def one_of(*values: str, default: str = MISSING) -> Any:
    return limited(lambda value: value in values, f"one of {', '.join(values)}", default)


def like(pattern: str, words: str, default: Any = MISSING) -> Any:
    return limited(lambda value: re.fullmatch(pattern, value) is not None, words, default)


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


PATTERN = Limit(_is_pattern, "a regular expression of parameter names")


def seconds() -> Any:
    """A deadline; torch and the C library use 64-bit nanoseconds."""
    return limited(lambda value: 0 < value <= 1e9, "greater than 0, and at most 1e9 (30 years)")


PRECISIONS = ("fp32", "bf16", "fp16")


def check_limits(node: Any, prefix: str = "") -> None:
    """Check every setting under ``node``, a dataclass, against the limit of its field."""
    for a_field in dataclasses.fields(node):
        name, value = prefix + a_field.name.rstrip("_"), getattr(node, a_field.name)
        if dataclasses.is_dataclass(value):
            check_limits(value, f"{name}.")
        elif "limit" in a_field.metadata:
            a_field.metadata["limit"].check(name, value)
