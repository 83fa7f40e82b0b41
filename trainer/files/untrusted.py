"""Data that others wrote, into a file or the store: checked for its type, and printed escaped."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from trainer.errors import UserError, first_few, first_line

_MAX_SHOWN = 300  # characters


def load_json(path: Any) -> dict[str, Any]:
    """The JSON object in the file at ``path``, a Path or an address.

    Raises:
        OSError: it does not exist, or cannot be read.
        UserError: as from ``read_json``.
    """
    with path.open("rb") as file:
        return read_json(path, file.read())


def read_json(path: object, data: bytes) -> dict[str, Any]:
    """The JSON object in ``data``. NaN and Infinity are accepted: ``Fields`` checks them.

    Raises:
        UserError: not UTF-8, not JSON, not an object.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{printable(path)} is damaged: it is not JSON ({reason(error)})") from error
    if not isinstance(value, dict):
        raise UserError(f"{printable(path)} is damaged: it holds no JSON object")
    return value


class Fields:
    """The values in a file by name, each checked for its type; raises UserError."""

    def __init__(self, origin: str, values: Any) -> None:
        """``origin`` names the file, and the place in it, for messages."""
        if not isinstance(values, Mapping):
            raise UserError(f"{printable(origin)} is {_shown(values)}, but must be a mapping")
        self._origin, self.values = origin, values

    def _take(self, name: str, kinds: type | tuple[type, ...], words: str) -> Any:
        if name not in self.values:
            raise UserError(f"{printable(self._origin)} has no {name}")
        value = self.values[name]
        if not isinstance(value, kinds) or isinstance(value, bool):
            self.refuse(name, words)
        return value

    def refuse(self, name: str, words: str) -> NoReturn:
        """Raise UserError: ``words`` say what the value of ``name`` must be."""
        shown = _shown(self.values[name])
        raise UserError(f"{printable(self._origin)}: {printable(name)} is {shown}, but must be {words}")

    def text(self, name: str) -> str:
        return self._take(name, str, "a text")

    def count(self, name: str) -> int:
        """A whole number, 0 or more, of at most 63 bits."""
        value: int = self._take(name, int, "a whole number")
        if not 0 <= value < 1 << 63:
            self.refuse(name, "a whole number, 0 or more, of at most 63 bits")
        return value

    def number(self, name: str) -> float:
        """A float, perhaps NaN or infinite."""
        value = self._take(name, (int, float), "a number")
        try:
            return float(value)
        except OverflowError:
            return math.inf

    def sequence(self, name: str, of: type = object) -> list[Any]:
        value: list[Any] = self._take(name, list, "a list")
        if not all(isinstance(item, of) for item in value):
            self.refuse(name, f"a list of {of.__name__}")
        return value

    def mapping(self, name: str) -> "Fields":
        return Fields(f"{self._origin}: {name}", self._take(name, Mapping, "a mapping"))

    def mappings(self, name: str) -> "list[Fields]":
        values = self.sequence(name, dict)
        return [Fields(f"{self._origin}: {name}[{index}]", value) for index, value in enumerate(values)]

    def has(self, name: str) -> bool:
        """Whether ``name`` has a value other than null."""
        return self.values.get(name) is not None


def printable(text: object, limit: int = _MAX_SHOWN) -> str:
    """``text`` on one line, cut short, with control and unprintable characters escaped."""
    words = str(text)
    if len(words) > limit:
        words = f"{words[:limit]}... ({len(words):,} characters)"
    if words.isprintable():
        return words
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)


def first_five(items: Iterable[object]) -> str:
    """As `first_few`, each escaped."""
    return first_few(map(printable, items))


def reason(error: BaseException) -> str:
    """The message of an error from other code, in one line; its type if it has none."""
    return printable(first_line(error))


def _shown(value: Any) -> str:
    """A value as text, of any size or depth."""
    if isinstance(value, dict | list | tuple):
        return f"a {type(value).__name__}"
    if isinstance(value, int) and value.bit_length() > 200:
        return "an int of many digits"
    return printable(repr(value))
