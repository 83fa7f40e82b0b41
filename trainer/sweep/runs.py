"""One way to read runs: what a run directory tells, of a trial or of any run."""

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from trainer.config.overrides import leaves
from trainer.errors import UserError, on_one_line
from trainer.files.untrusted import load_json, printable
from trainer.run_dir.metrics_file import read_metrics


class Run:
    """A run by its files. Before its end it has no `result`, and `scalars` until now."""

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder, self.name = folder, printable(name or folder.name)
        try:
            self.result = load_json(folder / "result.json")
        except (OSError, UserError):
            self.result = {}
        self.scalars = read_metrics(folder)

    @property
    def metrics(self) -> dict[str, float]:
        """From result.json, and the last values in metrics.jsonl."""
        last = {name: values[max(values)] for name, values in self.scalars.items()}
        numbers = {name: value for name, value in self.result.items() if type(value) in (int, float)}
        return last | numbers

    def number(self, name: str) -> float:
        """A number of result.json; NaN for null, which a run that was too short has."""
        value = self.result.get(name)
        return math.nan if value is None else float(value)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """config.yaml, by dotted names.

        Raises:
            UserError: it does not hold settings.
        """
        try:
            settings = OmegaConf.to_container(OmegaConf.load(self.folder / "config.yaml"), resolve=False)
        except (OSError, ValueError, YAMLError) as error:
            raise UserError(f"{self.folder} cannot be read: {printable(on_one_line(error))}") from error
        if not isinstance(settings, dict):
            raise UserError(f"{self.folder} is not a run: its config.yaml holds no settings")
        return dict(leaves(settings))


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, each column as wide as its widest cell."""
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in shown)
    return "\n".join("  ".join(cells).rstrip() for cells in lines)


def shown(value: float | None, digits: int = 6) -> str:
    """A number as a cell of a table, which is empty without one."""
    return "" if value is None or math.isnan(value) else f"{value:.{digits}g}"
