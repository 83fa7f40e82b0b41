"""Reads the files of figures that a plan uses; an invalid entry is named."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST = 1e15  # the limit in any unit: results from larger values would overflow


@dataclass(frozen=True)
class Entry:
    """A value of a JSON file; reading it as another type raises ValueError with its place in the file."""

    value: Any
    place: str = "the file"

    def __getitem__(self, name: str) -> "Entry":
        if (entry := self.get(name)) is None:
            raise ValueError(f"{self._place_of(name)} is missing")
        return entry

    def get(self, name: str) -> "Entry | None":
        """The entry, or None if it is missing or null."""
        if not isinstance(self.value, dict):
            raise self._is_not("an object {...}")
        value = self.value.get(name)
        return None if value is None else Entry(value, self._place_of(name))

    def each(self) -> "Iterator[Entry]":
        if not isinstance(self.value, list) or not self.value:
            raise self._is_not("a list [...] with at least one element")
        return (Entry(value, f"{self.place}[{index}]") for index, value in enumerate(self.value))

    def number(self, positive: bool = False, least: float = 0.0) -> float:
        number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        if not (number and least <= self.value <= MOST) or (positive and self.value == 0):
            raise self._is_not(f"a number {'above' if positive else 'from'} {least:g}, at most {MOST:g}")
        return float(self.value)

    def whole(self) -> int:
        if self.number() != int(self.value):
            raise self._is_not("a whole number")
        return int(self.value)

    def text(self, *choices: str) -> str:
        """Any text where there are no choices."""
        if not isinstance(self.value, str) or (choices and self.value not in choices):
            raise self._is_not(f"one of {', '.join(choices)}" if choices else "a string")
        return self.value

    def truth(self) -> bool:
        if not isinstance(self.value, bool):
            raise self._is_not("true or false")
        return self.value

    def _place_of(self, name: str) -> str:
        return name if self.place == Entry.place else f"{self.place}.{name}"

    def _is_not(self, needed: str) -> ValueError:
        shown = json.dumps(self.value)
        return ValueError(f"{self.place} is {shown[:60]}{'...' * (len(shown) > 60)}, but must be {needed}")


def read(file: Path) -> Entry:
    """Raises OSError, and ValueError if `file` is not JSON."""
    try:
        return Entry(json.loads(file.read_text()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} is not JSON: {error}") from error
