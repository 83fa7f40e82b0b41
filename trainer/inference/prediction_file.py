"""Write predictions to a file for other programs: CSV, JSON lines, or tensors."""

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
"""Values by name, each a list or tensor with a row for each sample."""


def write_csv(file: BinaryIO, columns: Columns) -> None:
    """Write a header and a line for each sample, with a column for each value in a row of a tensor."""
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
    """Write a JSON object for each sample."""
    plain = [
        _plain(_numbers(column)) if isinstance(column, Tensor) else column for column in columns.values()
    ]
    for values in zip(*plain, strict=True):
        file.write(json.dumps(dict(zip(columns, values, strict=True))).encode() + b"\n")


def write_pt(file: BinaryIO, columns: Columns) -> None:
    """Write a dict of the columns, as tensors and lists, for ``torch.load(FILE)``."""
    saved = io.BytesIO()  # torch.save would replace an OSError of the file with its own error
    torch.save(dict(columns), saved)
    file.write(saved.getbuffer())


WRITERS: dict[str, Callable[[BinaryIO, Columns], None]] = {
    ".csv": write_csv,
    ".jsonl": write_jsonl,
    ".pt": write_pt,
}


def writer_for(path: Path) -> Callable[[BinaryIO, Columns], None]:
    """Return the function that writes files with the suffix of `path`. Raises UserError if it is unknown."""
    if path.suffix not in WRITERS:
        raise UserError(f"the file name must end in .csv, .jsonl or .pt, but is {path.name}")
    return WRITERS[path.suffix]


def _numbers(tensor: Tensor) -> np.ndarray:
    """Return a NumPy array; bfloat16, which NumPy lacks, becomes float32."""
    return tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _plain(numbers: np.ndarray) -> list[Any]:
    """Return a list; a float32 prints as 0.1, not as 0.10000000149011612."""
    is_short = numbers.dtype in (np.float16, np.float32)
    plain: list[Any] = (numbers.astype(str).astype(np.float64) if is_short else numbers).tolist()
    return plain
