"""Read numbers and other values from JSON files, and check their types and limits."""

from pathlib import Path
from typing import Any, NoReturn

from trainer.errors import UserError
from trainer.files.untrusted import printable, read_json

MOST = 1e15  # the maximum in any unit, because results of larger values could overflow
_NAMES = {str: "a string", int: "an integer", float: "a number", list: "a list", dict: "a mapping"}


class Fields:
    """The values of a JSON object by name; ``origin`` is the file and the path in it, for messages."""

    def __init__(self, origin: str, values: Any) -> None:
        self._origin, self.values = origin, values

    def take(self, name: str, kind: type) -> Any:
        """Return the value of ``name``. Raise UserError if it is not a ``kind``; an int is also a float."""
        value = self.values.get(name)
        if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool):
            self.refuse(name, _NAMES[kind])
        return value

    def refuse(self, name: str, expected: str) -> NoReturn:
        """Raise UserError for the value of ``name``; ``expected`` describes valid values."""
        shown = printable(repr(self.values.get(name)))
        raise UserError(f"{printable(self._origin)}: {name} is {shown}, but must be {expected}")

    def mapping(self, name: str) -> "Fields":
        return Fields(f"{self._origin}: {name}", self.take(name, dict))

    def mappings(self, name: str) -> "list[Fields]":
        if not all(isinstance(value, dict) for value in self.take(name, list)):
            self.refuse(name, "a list of mappings")
        return [Fields(f"{self._origin}: {name}[{i}]", value) for i, value in enumerate(self.values[name])]


def read(file: Path) -> Fields:
    """Read a file. Raise OSError, or UserError if it is not a JSON object."""
    return Fields(file.name, read_json(Path(file.name), file.read_bytes()))


def number(fields: Fields, name: str, positive: bool = False) -> float:
    """Return the number `name`. Raise UserError if it is not a number, or out of range."""
    value = float(fields.take(name, float))
    if not 0 <= value <= MOST or (positive and value == 0):
        fields.refuse(name, f"a number {'above' if positive else 'from'} 0, at most {MOST:g}")
    return value
