"""Writes rows of samples to a file for other programs: CSV, JSON lines, or tensors."""

import csv
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from trainer.errors import UserError

Columns = Mapping[str, Any]
"""What is known of each sample by name: a list, or a tensor with a row for each."""


def write_csv(file: BinaryIO, columns: Columns) -> None:
    """Write a header, then a line for each row; tensors with several numbers take one column for each."""
    flat: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, Tensor) and column.ndim > 1:
            numbers = _numbers(column).reshape(len(column), -1)
            flat |= {f"{name}_{k}": numbers[:, k] for k in range(numbers.shape[1])}
        else:
            flat[name] = _numbers(column) if isinstance(column, Tensor) else column
    text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
    writer = csv.writer(text)
    writer.writerow(flat)
    writer.writerows(zip(*flat.values(), strict=True))
    text.detach()


def write_jsonl(file: BinaryIO, columns: Columns) -> None:
    """Write an object for each row; no header, since readers of such files take it for a row."""
    plain = [_plain(_numbers(one)) if isinstance(one, Tensor) else one for one in columns.values()]
    for values in zip(*plain, strict=True):
        file.write(json.dumps(dict(zip(columns, values, strict=True))).encode() + b"\n")


def write_pt(file: BinaryIO, columns: Columns) -> None:
    """Write one dict of columns, tensors and lists, for ``torch.load(FILE)``."""
    saved = io.BytesIO()  # torch turns an error of the disk into one of its own
    torch.save(dict(columns), saved)
    file.write(saved.getbuffer())


WRITERS: dict[str, Callable[[BinaryIO, Columns], None]] = {
    ".csv": write_csv,
    ".jsonl": write_jsonl,
    ".pt": write_pt,
}


def writer_for(path: Path) -> Callable[[BinaryIO, Columns], None]:
    """Raises UserError for an ending that is not in `WRITERS`."""
    if path.suffix not in WRITERS:
        raise UserError(f"{path}: the name must end in .csv, .jsonl or .pt")
    return WRITERS[path.suffix]


def _numbers(tensor: Tensor) -> np.ndarray:
    """NumPy's scalars print the shortest text that reads back as the same number."""
    return tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _plain(numbers: np.ndarray) -> list[Any]:
    """Convert 32-bit floats to the 64-bit ones that print the same: 0.1, not 0.10000000149011612."""
    is_short = numbers.dtype in (np.float16, np.float32)
    plain: list[Any] = (numbers.astype(str).astype(np.float64) if is_short else numbers).tolist()
    return plain
