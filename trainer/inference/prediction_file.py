"""Writes rows of samples to a file for other programs: CSV, JSON lines, or tensors."""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
from torch import Tensor

from trainer.errors import UserError


class PredictionFile(Protocol):
    """Takes rows a batch at a time; ``names`` holds what else is known of each sample."""

    def write(self, names: Mapping[str, Sequence[Any]], rows: Mapping[str, Tensor]) -> None: ...

    def end(self) -> None: ...


class Csv:
    """A header, then a line for each row; tensors with several numbers take one column for each."""

    def __init__(self, file: BinaryIO) -> None:
        self._text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
        self._writer, self._has_header = csv.writer(self._text), False

    def write(self, names: Mapping[str, Sequence[Any]], rows: Mapping[str, Tensor]) -> None:
        columns: dict[str, Any] = dict(names)
        for name, tensor in rows.items():
            flat = _numbers(tensor).reshape(len(tensor), -1)
            single = tensor.ndim == 1
            columns |= {name if single else f"{name}_{k}": flat[:, k] for k in range(flat.shape[1])}
        if not self._has_header:
            self._writer.writerow(columns)
            self._has_header = True
        self._writer.writerows(zip(*columns.values(), strict=True))

    def end(self) -> None:
        self._text.detach()


class Jsonl:
    """An object for each row; no header, since readers of such files take it for a row."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, names: Mapping[str, Sequence[Any]], rows: Mapping[str, Tensor]) -> None:
        columns = {**names, **{name: _plain(_numbers(tensor)) for name, tensor in rows.items()}}
        for values in zip(*columns.values(), strict=True):
            self._file.write(json.dumps(dict(zip(columns, values, strict=True))).encode() + b"\n")

    def end(self) -> None:
        pass


class Pt:
    """One dict of columns, tensors and lists, for ``torch.load(FILE)``; held in memory until the end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._names: dict[str, list[Any]] = {}
        self._rows: dict[str, list[Tensor]] = {}

    def write(self, names: Mapping[str, Sequence[Any]], rows: Mapping[str, Tensor]) -> None:
        for name, values in names.items():
            self._names.setdefault(name, []).extend(values)
        for name, tensor in rows.items():
            self._rows.setdefault(name, []).append(tensor)

    def end(self) -> None:
        names: dict[str, Any] = dict(self._names)
        if "index" in names:
            names["index"] = torch.tensor(names["index"])
        columns = names | {name: torch.cat(parts) for name, parts in self._rows.items()}
        try:
            torch.save(columns, self._file)
        except RuntimeError as error:  # torch's, for a file that the disk has cut short
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


KINDS: dict[str, Callable[[BinaryIO], PredictionFile]] = {".csv": Csv, ".jsonl": Jsonl, ".pt": Pt}


def kind_of(path: Path) -> Callable[[BinaryIO], PredictionFile]:
    """Raises UserError for an ending that is not in `KINDS`."""
    if path.suffix not in KINDS:
        raise UserError(f"{path}: the name must end in .csv, .jsonl or .pt")
    return KINDS[path.suffix]


def _numbers(tensor: Tensor) -> np.ndarray:
    """NumPy's scalars print the shortest text that reads back as the same number."""
    return tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _plain(numbers: np.ndarray) -> list[Any]:
    """Convert 32-bit floats to the 64-bit ones that print the same: 0.1, not 0.10000000149011612."""
    is_short = numbers.dtype in (np.float16, np.float32)
    plain: list[Any] = (numbers.astype(str).astype(np.float64) if is_short else numbers).tolist()
    return plain
