"""The one door through which every file of a checkpoint is read.

A checkpoint may come from a stranger, or from a disk that lost its mind. What lies under a file's name may
be a FIFO, a device, a link to somewhere else, or four terabytes of nothing; what it says may be of any type,
any length and any depth. So a file is opened once, its kind and size are asked of what was opened, and all
later reading goes through that one descriptor.
"""

import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from trainer.errors import UserError
from trainer.files.untrusted import printable, reason

_SPARSE_BYTES, _SPARSE_RATIO = 1 << 30, 16
_SMALL_PART_BYTES = 1 << 18


class MissingFileError(UserError):
    """There is nothing at all under the name."""


class PlainFile:
    """A regular file, opened once for reading; use it as a context.

    Attributes:
        size: in bytes, when it was opened.

    Raises:
        MissingFileError: there is none.
        UserError: a directory, a link (unless ``follow_links``), a FIFO, a device; unreadable; or a file of
            more than 1 GiB of which less than a sixteenth was ever written.
    """

    def __init__(self, path: Path, follow_links: bool = False) -> None:
        self.path = path
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # without O_NONBLOCK, opening a FIFO waits
        try:
            descriptor = os.open(path, flags | (0 if follow_links else os.O_NOFOLLOW))
        except FileNotFoundError as error:
            raise MissingFileError(f"{printable(path)} does not exist") from error
        except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
            if isinstance(error, OSError) and error.errno == errno.ELOOP:
                raise UserError(f"{printable(path)} is no plain file, but a link") from error
            raise UserError(f"{printable(path)} is unreadable ({_cause(error)})") from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise UserError(f"{printable(path)} is no plain file")
        self._file = io.FileIO(descriptor)
        self.size = status.st_size
        if self.size > _SPARSE_BYTES and _written_bytes(descriptor, self.size) * _SPARSE_RATIO < self.size:
            self.close()
            raise UserError(f"{printable(path)} claims {self.size:,} bytes, almost all of them never written")

    @property
    def descriptor_path(self) -> str:
        """A path to what was opened, whatever its name means by now."""
        return f"/dev/fd/{self._file.fileno()}"

    def read_at(self, offset: int, count: int) -> bytes:
        """Exactly ``count`` bytes from ``offset``. UserError if the file has no such part."""
        if not 0 <= offset <= offset + count <= self.size:
            raise UserError(
                f"{printable(self.path)} has no {count} bytes from {offset} on, but {self.size} in all"
            )
        parts, missing = [], count
        while missing:
            try:
                part = os.pread(self._file.fileno(), missing, offset + count - missing)
            except OSError as error:
                raise UserError(f"{printable(self.path)} is unreadable ({_cause(error)})") from error
            if not part:
                raise UserError(f"{printable(self.path)} became shorter while it was read")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def read(self, max_bytes: int) -> bytes:
        """All of it. UserError if that is more than ``max_bytes``."""
        if self.size > max_bytes:
            raise UserError(
                f"{printable(self.path)} has {self.size:,} bytes; more than {max_bytes:,} are not read"
            )
        return self.read_at(0, self.size)

    def blocks(self, num_bytes: int) -> Iterator[memoryview]:
        """The whole file in pieces of up to ``num_bytes``, each in the place of the one before."""
        block = bytearray(num_bytes)
        self._file.seek(0)
        while count := self._file.readinto(block):
            yield memoryview(block)[:count]

    def part(self, offset: int, length: int) -> "FilePart":
        return FilePart(self, offset, length)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "PlainFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FilePart(io.RawIOBase):
    """Some bytes of a file as a file of their own, for torch to read.

    A small part is read at once: torch and our own checks take some thirty pieces of it, each of which would
    be a system call otherwise.
    """

    def __init__(self, file: PlainFile, offset: int, length: int) -> None:
        if not 0 <= offset <= offset + length <= file.size:
            raise UserError(f"{printable(file.path)} has no {length} bytes from {offset} on")
        self.file, self.offset, self.length = file, offset, length
        self._position = 0
        self._whole = file.read_at(offset, length) if length <= _SMALL_PART_BYTES else None

    def read_at(self, offset: int, count: int) -> bytes:
        if not 0 <= offset <= offset + count <= self.length:
            raise UserError(f"{printable(self.file.path)} has a part that reaches beyond its end")
        if self._whole is not None:
            return self._whole[offset : offset + count]
        return self.file.read_at(self.offset + offset, count)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.length}[whence]
        )
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self.length - self._position))
        view[:count] = self.read_at(self._position, count) if count else b""
        self._position += count
        return count


def _written_bytes(descriptor: int, size: int) -> int:
    """How much of a file is no hole; all of it where the file system cannot tell.

    Not from st_blocks, which compression makes small, and some file systems leave at 0.
    """
    written = position = 0
    try:
        while position < size and written * _SPARSE_RATIO < size:
            position = os.lseek(descriptor, position, os.SEEK_DATA)
            end = os.lseek(descriptor, position, os.SEEK_HOLE)
            written, position = written + end - position, end
    except OSError as error:
        return written if error.errno == errno.ENXIO else size  # ENXIO: nothing but a hole from here on
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)
    return written


def _cause(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or reason(error)
