"""Files of the safetensors format: 8 bytes of length, a header of JSON, and the bytes of the tensors.

https://github.com/huggingface/safetensors. A file of this format contains no code. They are written here by
chunks, without full tensors in memory, and read by ranges.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.manifest import FileDigest, HashingFile
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
    """A tensor to be written: ``chunks`` are its rows, in order, on the CPU, and are read once."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Iterable[Tensor]


def stored_as(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and shape of a tensor in a file: bytes if the format has no name for its dtype."""
    return (dtype, shape) if dtype in NAMES else (torch.uint8, (math.prod(shape) * dtype.itemsize,))


def write_file(path: Path, tensors: Iterable[ToStore]) -> FileDigest:
    """Write a new file, hashed on the way and fsynced.

    Tensors should come in order of falling alignment: readers that map the file rely on it.

    Raises:
        OSError: of the disk.
        UserError: a tensor's chunks do not add up to its size.
    """
    tensors = list(tensors)
    header, places = header_of(tensors)
    with HashingFile(path) as file:
        file.write(header)
        for tensor, (begin, end) in zip(tensors, places, strict=True):
            for chunk in tensor.chunks:
                piece = as_bytes(chunk)
                begin += len(piece)
                if piece and begin <= end:
                    file.write(piece)
            if begin != end:
                raise UserError(f"{printable(tensor.key)} has {begin - end:+,} bytes compared with its shape")
    return file.digest


def header_of(tensors: Iterable[ToStore]) -> tuple[bytes, list[tuple[int, int]]]:
    """The first bytes of a file, and where each tensor begins and ends, counted from there on."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
    places: list[tuple[int, int]] = []
    end = 0
    for tensor in tensors:
        dtype, shape = stored_as(tensor.dtype, tensor.shape)
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[tensor.key] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
        places.append((begin, end))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


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
