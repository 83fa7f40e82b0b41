"""Data that others wrote, into a file or the store: checked for its type, and printed escaped."""

import json
from collections.abc import Iterable
from typing import Any

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
    """The JSON object in ``data``. NaN and Infinity are accepted.

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
