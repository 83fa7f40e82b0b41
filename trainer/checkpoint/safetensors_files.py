"""Files of the safetensors format: 8 bytes of length, a header of JSON, and the bytes of the tensors.

https://github.com/huggingface/safetensors. A file of this format contains no code. They are written here
tensor by tensor, and read by ranges.
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

# Every version of the library since 0.4 reads these.
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
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # in a folder of Hugging Face


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, at the bytes from ``begin`` to ``end`` of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class ToStore:
    """A tensor to be written under the name ``key``, converted to ``dtype`` when it is written."""

    key: str
    tensor: Tensor
    dtype: torch.dtype


def stored_as(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and shape of a tensor in a file: bytes if the format has no name for its dtype."""
    return (dtype, shape) if dtype in NAMES else (torch.uint8, (math.prod(shape) * dtype.itemsize,))


def write_file(path: Path, tensors: Sequence[ToStore]) -> FileDigest:
    """Write a new file, hashed on the way and fsynced.

    Tensors should come in order of falling alignment: readers that map the file rely on it.

    Raises:
        OSError: of the disk.
    """
    parts = (as_bytes(each.tensor.to("cpu", each.dtype)) for each in tensors if each.tensor.numel())
    return write_hashed(path, itertools.chain([_header_of(tensors)], parts))


def _header_of(tensors: Sequence[ToStore]) -> bytes:
    """The first bytes of a file: where each tensor begins and ends, counted from there on."""
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
    """Where each tensor is in ``file``, by its name; only the header is read.

    Raises:
        UserError: there is none, a dtype is unknown, or a tensor is not where it would be.
    """
    try:
        origin = 8 + int.from_bytes(file.read(0, 8), "little")
        header = json.loads(file.read(8, origin))
        header.pop("__metadata__", None)
        return {name: _stored(entry, origin, file.size) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        words = f"{type(error).__name__}: {reason(error)}"
        raise UserError(f"{printable(file.path)} is not a safetensors file: {words}") from error


def _stored(entry: dict[str, Any], origin: int, size: int) -> Stored:
    """The tensor of a header's ``entry``; its offsets are counted from byte ``origin`` of the file on."""
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = (origin + offset for offset in entry["data_offsets"])
    if end - begin != math.prod(shape) * dtype.itemsize or not origin <= begin <= end <= size:
        raise ValueError(f"{shape} of {dtype} would be at bytes {begin:,} to {end:,} of {size:,}")
    return Stored(dtype, shape, begin, end)


def tensors_in(file: PlainFile) -> dict[str, Tensor]:
    """The tensors of ``file`` by name, mapped from it and read when used. Raises as `read_header`."""
    return {
        name: as_tensor(file.part(place.begin, place.end), place.dtype, place.shape)
        for name, place in read_header(file).items()
    }


def as_tensor(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The bytes ``data``, uint8 of one dimension, as a tensor: a view if their alignment allows."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(shape)
