"""Read byte ranges of a checkpoint's files, on disk or at a URL."""

import contextlib
import io
import os
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from trainer.errors import RetryableError, UserError, kind_of
from trainer.files.address import Address, Location
from trainer.files.untrusted import printable, reason
from trainer.tensors.bits import as_bytes

_FETCH_BYTES, _NUM_CACHED = 1 << 20, 32  # block size in bytes; number of cached blocks


class MissingFileError(UserError):
    """The file does not exist."""


class PlainFile(contextlib.AbstractContextManager["PlainFile"]):
    """A file that is open for reading, and a context manager that closes it.

    Attributes:
        size: the number of bytes when the file was opened.
        chunk_bytes: the fastest read size for long files, chosen to fit the cache of a core.

    Raises:
        MissingFileError: if the file does not exist.
        UserError: if it is a directory or access is denied.
        RetryableError: if it cannot be read now.
    """

    chunk_bytes = 1 << 20
    path: Location
    size: int

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = io.FileIO(path)
        except FileNotFoundError as error:
            raise MissingFileError(f"{printable(path)} does not exist") from error
        except OSError as error:
            raise _read_error(path, error) from error
        self.size = os.fstat(self._file.fileno()).st_size

    @property
    def descriptor_path(self) -> str:
        """A path to the open file that stays valid if the file is renamed or replaced."""
        return f"/dev/fd/{self._file.fileno()}"

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes at ``offset``. Raise UserError if the file is too short."""
        end = offset + len(buffer)
        while buffer:
            count = self._read_some(end - len(buffer), buffer)
            if count == 0:
                raise UserError(f"{printable(self.path)} is too short: bytes {offset} to {end} are missing")
            buffer = buffer[count:]

    def _read_some(self, offset: int, buffer: memoryview) -> int:
        try:
            return os.preadv(self._file.fileno(), [buffer], offset)
        except OSError as error:
            raise _read_error(self.path, error) from error

    def read(self, begin: int = 0, end: int | None = None) -> bytes:
        """Return the bytes [begin, end), or all bytes. Raise UserError if the file is too short."""
        end = self.size if end is None else end
        data = bytearray(min(end, self.size + 1) - begin)  # limits the memory that a wrong `end` takes
        self.read_into(begin, memoryview(data))
        return bytes(data)

    def part(self, begin: int, end: int) -> Tensor:
        """Return the bytes [begin, end) as uint8, memory-mapped. Writes don't change the file."""
        return self._mapped[begin:end]

    @cached_property
    def _mapped(self) -> Tensor:
        return torch.from_file(self.descriptor_path, shared=False, size=self.size, dtype=torch.uint8)

    def close(self) -> None:
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteFile(PlainFile):
    """A file at a URL. Small reads fetch blocks of 1 MiB, and the last 32 blocks are cached."""

    chunk_bytes = 1 << 24

    def __init__(self, path: Address) -> None:
        self.path = self._address = path
        try:
            self.size = path.size()
        except FileNotFoundError as error:
            raise MissingFileError(f"{printable(path)} does not exist") from error
        self._block = lru_cache(_NUM_CACHED)(self._fetch)

    def _read_some(self, offset: int, buffer: memoryview) -> int:
        if len(buffer) >= _FETCH_BYTES:
            data = self._fetch(offset, offset + len(buffer))
        else:
            begin = offset - offset % _FETCH_BYTES
            data = self._block(begin, begin + _FETCH_BYTES)[offset - begin :][: len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def _fetch(self, begin: int, end: int) -> bytes:
        try:
            return self._address.read(begin, min(end, self.size)) if begin < self.size else b""
        except FileNotFoundError as error:
            raise UserError(f"{printable(self.path)} was deleted while it was being read") from error

    def part(self, begin: int, end: int) -> Tensor:
        """Read the bytes [begin, end) and return them as uint8."""
        data = torch.empty(end - begin, dtype=torch.uint8)
        self.read_into(begin, as_bytes(data))
        return data

    def close(self) -> None:
        self._block.cache_clear()


def opened(path: Location) -> PlainFile:
    """Open the file at `path` for reading. Raises the errors of `PlainFile`."""
    return RemoteFile(path) if isinstance(path, Address) else PlainFile(path)


def _read_error(path: Location, error: OSError) -> UserError | RetryableError:
    return kind_of(error)(f"{printable(path)} cannot be read ({error.strerror or reason(error)})")
