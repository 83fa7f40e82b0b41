"""Files that know their sha256 by the time they are on the disk."""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from trainer.checkpoint.reading import PlainFile
from trainer.faults.heartbeat import at_disk

_BLOCK_BYTES = 1 << 20
_WORTH_A_THREAD_BYTES = 1 << 18
_PUSH_BYTES = 1 << 26


@dataclass(frozen=True)
class FileDigest:
    sha256: str
    bytes: int


class HashingFile:
    """A new file that is hashed and pushed to the disk while it is written, and fsynced when closed.

    Writing, hashing and the disk all work without the GIL, so with two cores to spare the hash costs next to
    nothing. Only what ``torch.save`` and ``torch.distributed.checkpoint`` call is here. ``error`` keeps the
    first OSError of a write: torch replaces it by one of its own that no longer says "no space left".
    """

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("xb", buffering=0)
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="checkpoint")
        self._unsynced_bytes = 0
        self._syncing: Future[None] | None = None
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        hashed = None
        if len(view) >= _WORTH_A_THREAD_BYTES:
            hashed = self._threads.submit(self._hash.update, view)
        else:
            self._hash.update(view)
        try:
            written = 0
            while written < len(view):
                with at_disk():  # a slow disk is not silence
                    written += self._file.write(view[written:])
        except OSError as error:
            self.error = self.error or error
            raise
        finally:
            if hashed is not None:
                hashed.result()  # the caller may reuse its buffer as soon as this returns
        self._bytes += len(view)
        self._push(len(view))
        return len(view)

    def _push(self, num_bytes: int) -> None:
        """Let the disk work already, so that the last fsync finds little to do."""
        self._unsynced_bytes += num_bytes
        if self._unsynced_bytes >= _PUSH_BYTES and (self._syncing is None or self._syncing.done()):
            if self._syncing is not None:
                self._syncing.result()  # the kernel tells of a failed write-back once only
            self._syncing = self._threads.submit(os.fdatasync, self._file.fileno())
            self._unsynced_bytes = 0

    def tell(self) -> int:
        return self._bytes

    def flush(self) -> None:
        """Nothing is buffered here."""

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        if not self._file.closed:
            try:
                with at_disk():
                    if self._syncing is not None:
                        self._syncing.result()
                    os.fsync(self._file.fileno())
            finally:
                self._release()

    def _release(self) -> None:
        self._threads.shutdown()  # first: a thread may still use the file's descriptor
        self._file.close()

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
        self._release()
        if self.error is not None and error is not self.error:
            raise self.error from error


@contextmanager
def without_crc32() -> Iterator[None]:
    """Spare the zip container's own checksums, a fifth of the time to save: the manifest has a better one."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def digest_of(file: PlainFile) -> FileDigest:
    """sha256 and size of ``file``, read in blocks."""
    sha, num_bytes = hashlib.sha256(), 0
    for block in file.blocks(_BLOCK_BYTES):
        sha.update(block)
        num_bytes += len(block)
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
