"""Values in the files of results that a plan uses: of the right type, within limits, or refused by name."""

from pathlib import Path
from typing import Any, NoReturn

from trainer.errors import UserError
from trainer.files.untrusted import printable, read_json

MOST = 1e15  # the limit in any unit: results from larger values would overflow
_WORDS = {str: "a text", int: "a whole number", float: "a number", list: "a list", dict: "a mapping"}


class Fields:
    """The values in a file by name; ``origin`` names the file, and the place in it, for messages."""

    def __init__(self, origin: str, values: Any) -> None:
        self._origin, self.values = origin, values

    def take(self, name: str, kind: type) -> Any:
        """The value of ``name``. Raises UserError unless it is a ``kind``; ints are floats, too."""
        value = self.values.get(name)
        if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool):
            self.refuse(name, _WORDS[kind])
        return value

    def refuse(self, name: str, words: str) -> NoReturn:
        """Raise UserError: ``words`` say what the value of ``name`` must be."""
        shown = printable(repr(self.values.get(name)))
        raise UserError(f"{printable(self._origin)}: {name} is {shown}, but must be {words}")

    def mapping(self, name: str) -> "Fields":
        return Fields(f"{self._origin}: {name}", self.take(name, dict))

    def mappings(self, name: str) -> "list[Fields]":
        if not all(isinstance(value, dict) for value in self.take(name, list)):
            self.refuse(name, "a list of mappings")
        return [Fields(f"{self._origin}: {name}[{i}]", value) for i, value in enumerate(self.values[name])]


def read(file: Path) -> Fields:
    """Raises OSError, and UserError if `file` is not a JSON object."""
    return Fields(file.name, read_json(Path(file.name), file.read_bytes()))


def number(fields: Fields, name: str, positive: bool = False) -> float:
    """The number under `name`. Raises UserError for another value, or one outside its limits."""
    value = float(fields.take(name, float))
    if not 0 <= value <= MOST or (positive and value == 0):
        fields.refuse(name, f"a number {'above' if positive else 'from'} 0, at most {MOST:g}")
    return value
