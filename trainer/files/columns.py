"""Tables of aligned columns."""

from collections.abc import Sequence

from trainer.files.untrusted import printable


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as text, with each column as wide as its widest cell."""
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in shown)
    return "\n".join("  ".join(cells).rstrip() for cells in lines)


def cell(value: float | None, form: str = ".6g") -> str:
    """Return a number as a cell of a table; an empty cell for None."""
    return "" if value is None else f"{value:{form}}"
