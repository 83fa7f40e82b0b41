"""Files that know their sha256 by the time they are on the disk, block by block."""

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from trainer.checkpoint.reading import PlainFile
from trainer.errors import UserError
from trainer.faults.heartbeat import at_disk
from trainer.files.untrusted import printable

BLOCK_BYTES = 1 << 24
ALGORITHM = "sha256 of each 16 MiB"  # by this name in manifests
_NUM_THREADS = min(4, os.cpu_count() or 1)
_PUSH_BYTES = 1 << 26
_SMALL_BYTES = 1 << 18


@dataclass(frozen=True)
class FileDigest:
    """The size of a file and the sha256 of each of its blocks: of all of it, if it is no longer than one.

    One sha256 of everything could be computed by one core only, and proves nothing to a reader of a part.
    """

    bytes: int
    sha256: tuple[str, ...]


class HashingFile:
    """A new file that is hashed and pushed to the disk while it is written, and fsynced when closed.

    Writing, hashing and the disk all work without the GIL, each in threads of its own. What is given to
    `write` must not change before the file is closed. At most four blocks wait to be hashed, so that no more
    is kept in memory than these and what they are part of.
    """

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("xb", buffering=0)
        self._bytes = 0
        self._block: list[memoryview] = []  # what is written of the block that is not yet full
        self._hashes: list[Future[str]] = []
        self._threads = ThreadPoolExecutor(_NUM_THREADS + 1, thread_name_prefix="checkpoint")
        self._unsynced_bytes = 0
        self._syncing: Future[None] | None = None

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        while view:
            part = view[: BLOCK_BYTES - self._bytes % BLOCK_BYTES]
            view = view[len(part) :]
            self._block.append(part)
            self._bytes += len(part)
            if self._bytes % BLOCK_BYTES == 0:
                self._hash_block()
            while part:
                with at_disk():  # a slow disk is not silence
                    part = part[self._file.write(part) :]
            self._push()

    def _hash_block(self) -> None:
        if len(self._hashes) >= _NUM_THREADS:
            self._hashes[-_NUM_THREADS].result()
        block, self._block = self._block, []
        self._hashes.append(_submit(self._threads, block))

    def _push(self) -> None:
        """Let the disk work already, so that the last fsync finds little to do."""
        if self._bytes - self._unsynced_bytes >= _PUSH_BYTES and (
            self._syncing is None or self._syncing.done()
        ):
            if self._syncing is not None:
                self._syncing.result()  # the kernel tells of a failed write-back once only
            self._syncing = self._threads.submit(os.fdatasync, self._file.fileno())
            self._unsynced_bytes = self._bytes

    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def digest(self) -> FileDigest:
        """Known once the file is closed."""
        return FileDigest(self._bytes, tuple(block.result() for block in self._hashes))

    def __enter__(self) -> "HashingFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                if self._block:
                    self._hash_block()
                with at_disk():
                    if self._syncing is not None:
                        self._syncing.result()
                    os.fsync(self._file.fileno())
        finally:
            self._threads.shutdown()  # first: a thread may still use the file's descriptor
            self._file.close()


def _sha256(parts: list[memoryview]) -> str:
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part)
    return sha.hexdigest()


def check_blocks(
    file: PlainFile,
    digest: FileDigest,
    blocks: Iterable[int],
    look: Callable[[int, memoryview], None] = lambda offset, block: None,
) -> None:
    """Compare some blocks of ``file``, by number, with ``digest``; ``look`` is given the offset and each.

    Raises:
        UserError: one differs.
    """

    def check(number: int) -> bool:
        sha, begin = hashlib.sha256(), number * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, file.size)
        memory = memoryview(bytearray(min(file.piece_bytes, end - begin)))
        for offset in range(begin, end, file.piece_bytes):
            piece = memory[: end - offset]
            file.read_into(offset, piece)
            sha.update(piece)
            look(offset, piece)
        return sha.hexdigest() == digest.sha256[number]

    blocks = list(blocks)
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="checkpoint") as threads:
        if not all((threads.map if len(blocks) > 1 else map)(check, blocks)):
            where, name = printable(file.path.parent), printable(file.path.name)
            raise UserError(f"{where} is damaged: the sha256 of {name} is not the manifest's")


def _submit(threads: ThreadPoolExecutor, block: list[memoryview]) -> Future[str]:
    """The sha256 of `block`, to come; of a small one at once."""
    if sum(map(len, block)) > _SMALL_BYTES:
        return threads.submit(_sha256, block)
    done: Future[str] = Future()
    done.set_result(_sha256(block))
    return done


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
