"""Read and print data from files or stores that other programs may have written."""

import json
from collections.abc import Iterable
from typing import Any

from trainer.errors import UserError, first_few, first_line

_MAX_SHOWN = 300  # characters


def load_json(path: Any) -> dict[str, Any]:
    """Return the JSON object in the file at `path`, a Path or an `Address`, or raise OSError or UserError."""
    with path.open("rb") as file:
        return read_json(path, file.read())


def read_json(path: object, data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`, which may contain NaN and Infinity, or raise UserError."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{printable(path)} is damaged: it is not valid JSON ({reason(error)})") from error
    if not isinstance(value, dict):
        raise UserError(f"{printable(path)} is damaged: it does not contain a JSON object")
    return value


def printable(text: object, limit: int = _MAX_SHOWN) -> str:
    """Return `text` truncated to `limit` characters, with unprintable characters escaped."""
    shown = str(text)
    if len(shown) > limit:
        shown = f"{shown[:limit]}... ({len(shown):,} characters)"
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def first_five(items: Iterable[object]) -> str:
    """Return `first_few` of the items, with unprintable characters escaped."""
    return first_few(map(printable, items))


def reason(error: BaseException) -> str:
    """Return the message of a third-party error on one line; its type if it has no message."""
    return printable(first_line(error))
