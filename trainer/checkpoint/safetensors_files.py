"""Read and write safetensors files: the length of the header (8 bytes), a JSON header, and the tensors.

Files are written tensor by tensor and read in byte ranges. The format, which cannot contain code, is
documented at https://github.com/huggingface/safetensors.
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.manifest import FileDigest, write_hashed
from trainer.checkpoint.reading import PlainFile
from trainer.errors import UserError
from trainer.files.untrusted import printable, reason
from trainer.tensors.bits import as_bytes

# The dtypes that every version of the safetensors library since 0.4 reads.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # names in a Hugging Face folder


@dataclass(frozen=True)
class Stored:
    """The location of a tensor in a file: bytes [begin, end)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class ToStore:
    """A tensor to write under the name ``key``, converted to ``dtype``."""

    key: str
    tensor: Tensor
    dtype: torch.dtype


def stored_as(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape of a tensor in a file, which are those of bytes for an unsupported dtype."""
    return (dtype, shape) if dtype in NAMES else (torch.uint8, (math.prod(shape) * dtype.itemsize,))


def write_file(path: Path, tensors: Sequence[ToStore]) -> FileDigest:
    """Write a new file, fsync it and return its digest.

    Pass the tensors in order of descending element size: readers that map the file rely on alignment.
    """
    parts = (as_bytes(each.tensor.to("cpu", each.dtype)) for each in tensors if each.tensor.numel())
    return write_hashed(path, itertools.chain([_header_of(tensors)], parts))


def _header_of(tensors: Sequence[ToStore]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
    end = 0
    for each in tensors:
        dtype, shape = stored_as(each.dtype, tuple(each.tensor.shape))
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[each.key] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(file: PlainFile) -> dict[str, Stored]:
    """Return the location of each tensor in ``file``, by name, without reading the tensors.

    Raises:
        UserError: if the header is missing, a dtype is unknown, or an offset is invalid.
    """
    try:
        origin = 8 + int.from_bytes(file.read(0, 8), "little")
        header = json.loads(file.read(8, origin))
        header.pop("__metadata__", None)
        return {name: _stored(entry, origin, file.size) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {reason(error)}"
        raise UserError(f"{printable(file.path)} is not a valid safetensors file: {problem}") from error


def _stored(entry: dict[str, Any], origin: int, size: int) -> Stored:
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = (origin + offset for offset in entry["data_offsets"])
    if end - begin != math.prod(shape) * dtype.itemsize or not origin <= begin <= end <= size:
        where = f"bytes {begin:,} to {end:,} of a file of {size:,} bytes"
        raise ValueError(f"a {dtype} tensor of shape {shape} cannot be stored in {where}")
    return Stored(dtype, shape, begin, end)


def tensors_in(file: PlainFile) -> dict[str, Tensor]:
    """Return the tensors of ``file`` by name, memory-mapped. Raises the errors of `read_header`."""
    return {
        name: as_tensor(file.part(stored.begin, stored.end), stored.dtype, stored.shape)
        for name, stored in read_header(file).items()
    }


def as_tensor(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return ``data``, a 1-D uint8 tensor, as a tensor of ``dtype``: a view if the alignment allows."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(shape)
