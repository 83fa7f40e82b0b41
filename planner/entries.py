"""Numbers in the files of results that a plan uses: within limits, or refused by name."""

from pathlib import Path

from trainer.files.untrusted import Fields, read_json

MOST = 1e15  # the limit in any unit: results from larger values would overflow


def read(file: Path) -> Fields:
    """Raises OSError, and UserError if `file` is not a JSON object."""
    return Fields(file.name, read_json(Path(file.name), file.read_bytes()))


def number(fields: Fields, name: str, positive: bool = False) -> float:
    """The number under `name`. Raises UserError for another value, or one outside its limits."""
    value = fields.number(name)
    if not 0 <= value <= MOST or (positive and value == 0):
        fields.refuse(name, f"a number {'above' if positive else 'from'} 0, at most {MOST:g}")
    return value
