"""Files that know their sha256 by the time they are on the disk."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

_BLOCK_BYTES = 1 << 20
_WORTH_A_THREAD_BYTES = 1 << 18


@dataclass(frozen=True)
class FileDigest:
    sha256: str
    bytes: int


class HashingFile:
    """A new file that hashes what is written while the kernel takes it, and fsyncs when closed.

    Both release the GIL, so on two cores the hash costs next to nothing. Only what ``torch.save`` and
    ``torch.distributed.checkpoint`` call is here. ``error`` keeps the first OSError of a write: torch
    replaces it by one of its own that no longer says "no space left on device".
    """

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("xb", buffering=0)
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sha256")
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        hashed = None
        if len(view) >= _WORTH_A_THREAD_BYTES:
            hashed = self._thread.submit(self._hash.update, view)
        else:
            self._hash.update(view)
        try:
            written = 0
            while written < len(view):
                written += self._file.write(view[written:])
        except OSError as error:
            self.error = self.error or error
            raise
        finally:
            if hashed is not None:
                hashed.result()  # the caller may reuse its buffer as soon as this returns
        self._bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self._bytes

    def flush(self) -> None:
        """Nothing is buffered here."""

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        if not self._file.closed:
            try:
                os.fsync(self._file.fileno())
            finally:
                self._file.close()
                self._thread.shutdown()

    @property
    def digest(self) -> FileDigest:
        return FileDigest(self._hash.hexdigest(), self._bytes)

    def __enter__(self) -> "HashingFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._file.close()
        self._thread.shutdown()
        if self.error is not None and error is not self.error:
            raise self.error from error


def digest_of(path: Path) -> FileDigest:
    """sha256 and size of the file at ``path``, read in blocks."""
    sha, num_bytes, block = hashlib.sha256(), 0, bytearray(_BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            sha.update(memoryview(block)[:count])
            num_bytes += count
    return FileDigest(sha.hexdigest(), num_bytes)


def write_text(path: Path, text: str) -> FileDigest:
    """Write ``text`` to the new file ``path``, fsynced."""
    with HashingFile(path) as file:
        file.write(text.encode())
    return file.digest


def fsync_directory(path: Path) -> None:
    """Make the names in ``path`` durable: a file's own fsync does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
