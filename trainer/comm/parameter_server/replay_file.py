"""The file with the order of asynchronous servers' events, so that a run can be repeated.

A line of JSON for each round: its first step, its number of steps, and each server's events in order. A
resumed run writes some rounds again; of those with the same first step the last one counts. A last line
without its end is torn: the process was killed as it wrote. No checkpoint was saved after that
round, so a resumed run makes it again.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

_FIELDS = ("roles", "first_step", "steps", "events")


def append(
    file: Path, roles: Mapping[str, Any], first_step: int, steps: int, events: Sequence[Sequence[str]]
) -> None:
    """Add a round. `roles` must be the same in a run that repeats it. Raises OSError as any file does."""
    line = json.dumps(dict(zip(_FIELDS, (roles, first_step, steps, events), strict=True)))
    with file.open("a+b") as out:
        _drop_torn_line(out)
        out.write(line.encode() + b"\n")


def _drop_torn_line(file: BinaryIO) -> None:
    if file.seek(0, os.SEEK_END) == 0:
        return
    file.seek(-1, os.SEEK_END)
    if file.read() != b"\n":
        file.seek(0)
        file.truncate(_whole(file.read()))


def _whole(text: bytes) -> int:
    """The length of `text` up to the end of its last whole line."""
    return text.rfind(b"\n") + 1


def read(file: Path, roles: Mapping[str, Any]) -> dict[int, tuple[int, list[list[str]]]]:
    """Return, by first step of a round, its number of steps and each server's events.

    Raises:
        OSError: the file does not exist.
        ValueError: it is not a replay file, or of a run with other roles.
    """
    found, text = {}, file.read_bytes()
    for number, line in enumerate(text[: _whole(text)].splitlines(), 1):
        try:
            own, first_step, steps, events = (json.loads(line)[field] for field in _FIELDS)
            num_servers = len(own["servers"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"line {number} is not a round of an asynchronous run") from error
        are_counts = isinstance(first_step, int) and isinstance(steps, int)
        if not (are_counts and _are_events(events) and len(events) == num_servers):
            raise ValueError(f"line {number} is not a round of {num_servers} servers")
        for name, value in roles.items():
            if own.get(name) != value:
                theirs = ascii(own.get(name))[:100]
                raise ValueError(f"it is of a run with {name} {theirs}, but this run has {value}")
        found[first_step] = (steps, events)
    return found


def _are_events(events: object) -> bool:
    lists = events if isinstance(events, list) else [None]
    return all(isinstance(own, list) and all(isinstance(word, str) for word in own) for own in lists)
