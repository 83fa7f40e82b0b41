"""Files that are hashed by blocks while they are written, and the manifest that lists them."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.checkpoint.evaluations import State
from trainer.checkpoint.reading import MissingFileError, PlainFile, opened
from trainer.errors import NoAccessError, UserError
from trainer.failures.heartbeat import at_disk
from trainer.files.address import Location, UnreachableError
from trainer.files.untrusted import printable, read_json

BLOCK_BYTES = 1 << 24
_NUM_THREADS = min(4, os.cpu_count() or 1)
_BLOCKS_TO_SYNC = 4  # between two calls of fdatasync
_JOINED_BYTES = 1 << 20  # smaller pieces are written together: a write costs as much as to copy 100 kB


@dataclass(frozen=True)
class FileDigest:
    """The size of a file and the sha256 of each of its blocks.

    One sha256 of the whole file could be computed by one core only, and a reader of a part could not use it.
    """

    bytes: int
    sha256: tuple[str, ...]


def write_hashed(path: Path, pieces: Iterable[Any]) -> FileDigest:
    """Write a new file, hashed and pushed to the disk on the way, and fsynced.

    Writing, hashing and syncing release the GIL and run in separate threads. At most four blocks wait to be
    hashed, which limits the memory in use.

    Args:
        pieces: contiguous buffers, such as bytes, which must not change before this returns.

    Raises:
        FileExistsError: there is something at ``path``.
        OSError: the disk failed.
    """
    num_bytes, hashes = 0, list[Future[str]]()
    syncing: Future[None] | None = None
    # The threads end first, because one may still use the file's descriptor.
    with (
        path.open("xb", buffering=_JOINED_BYTES) as file,
        ThreadPoolExecutor(_NUM_THREADS + 1, thread_name_prefix="checkpoint") as threads,
    ):
        for block in _blocks(pieces):
            if len(hashes) >= _NUM_THREADS:
                hashes[-_NUM_THREADS].result()
            hashes.append(threads.submit(_sha256, block))
            num_bytes += sum(map(len, block))
            with at_disk():  # a slow disk is not a silent rank
                file.writelines(block)
            # Data goes to the disk meanwhile, so that the fsync at the end is short.
            if len(hashes) % _BLOCKS_TO_SYNC == 0 and (syncing is None or syncing.done()):
                if syncing is not None:
                    syncing.result()  # the kernel reports a failed write-back only once
                syncing = threads.submit(os.fdatasync, file.fileno())
        with at_disk():
            file.flush()
            if syncing is not None:
                syncing.result()
            os.fsync(file.fileno())
    return FileDigest(num_bytes, tuple(block.result() for block in hashes))


def _blocks(pieces: Iterable[Any]) -> Iterator[list[memoryview]]:
    """The bytes of ``pieces`` in blocks of parts, which are not copied; the last block may be shorter."""
    block, size = list[memoryview](), 0
    for piece in pieces:
        view = memoryview(piece).cast("B")
        while view:
            part, view = view[: BLOCK_BYTES - size], view[BLOCK_BYTES - size :]
            block.append(part)
            size += len(part)
            if size == BLOCK_BYTES:
                yield block
                block, size = [], 0
    if block:
        yield block


def _sha256(parts: list[memoryview]) -> str:
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part)
    return sha.hexdigest()


def check_blocks(file: PlainFile, digest: FileDigest, blocks: Sequence[int]) -> None:
    """Compare the blocks of ``file`` with these numbers with ``digest``.

    Raises:
        UserError: a block differs, or cannot be read.
    """

    def is_intact(number: int) -> bool:
        sha, begin = hashlib.sha256(), number * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, file.size)
        memory = memoryview(bytearray(min(file.chunk_bytes, end - begin)))
        for offset in range(begin, end, file.chunk_bytes):
            chunk = memory[: end - offset]
            file.read_into(offset, chunk)
            sha.update(chunk)
        return sha.hexdigest() == digest.sha256[number]

    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="checkpoint") as threads:
        if not all((threads.map if len(blocks) > 1 else map)(is_intact, blocks)):
            where, name = printable(file.path.parent), printable(file.path.name)
            raise UserError(f"{where} is damaged: the sha256 of {name} is not the manifest's")


def write_text(path: Path, text: str) -> FileDigest:
    """Write ``text`` to the new file ``path``, fsynced."""
    return write_hashed(path, [text.encode()])


def fsync_directory(path: Path) -> None:
    """Make the names in ``path`` durable: a file's own fsync does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


MANIFEST = "manifest.json"
FORMAT_VERSION = 5
READ_VERSIONS = (4, 5)  # 4 differs in the index of tensors: see `layout.index_of_version_4`
_OWN = ', "sha256": "'  # before the hash of all that stands before it
_STEP_NAME = re.compile(r"step_([0-9]{8,})(?:-[0-9]+)?")  # -2: beside another of this step
_RUN_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint contains: enough to list and verify it without opening its tensors."""

    format: str  # full or sharded: who wrote the tensors, rank 0 or each rank its own
    step: int
    saved_at: float  # seconds since 1970, by the clock of rank 0
    files: dict[str, FileDigest]
    run_id: str = ""  # of the run that saved it
    branch: str = ""  # and the branch of that run: see `evaluations`
    format_version: int = FORMAT_VERSION

    @property
    def summary(self) -> "Manifest":
        """This without the hashes, which take megabytes in a large run: of each checkpoint that is kept."""
        return replace(self, files={})

    @property
    def state(self) -> State:
        return State(self.branch, self.step)

    @property
    def num_bytes(self) -> int:
        return sum(digest.bytes for digest in self.files.values())


def manifest_text(manifest: Manifest) -> str:
    """``manifest`` as JSON that ends with the sha256 of what stands before, so that a changed bit is found.

    Without indents, which take Python ten times as long: that of 1 TB has 60,000 hashes.
    """
    # Not by asdict, which copies each hash in ten times the time.
    content = {**vars(manifest), "files": {name: vars(digest) for name, digest in manifest.files.items()}}
    text = json.dumps(content, sort_keys=True)[:-1]
    return f'{text}{_OWN}{hashlib.sha256(text.encode()).hexdigest()}"}}\n'


def read_manifest(directory: Location) -> Manifest:
    """The manifest of the checkpoint in ``directory``; UserError if it is missing or damaged."""
    path = directory / MANIFEST
    try:
        with opened(path) as file:
            text = file.read()
    except MissingFileError as error:
        way = "; a run has its own in its folder checkpoints"
        raise UserError(f"{printable(directory)} is not a checkpoint: it has no {MANIFEST}{way}") from error
    values = read_json(path, text)
    if (version := values.get("format_version")) not in READ_VERSIONS:
        raise UserError(
            f"{printable(directory)} has format version {printable(version)}; "
            f"{READ_VERSIONS[0]} to {FORMAT_VERSION} are read here: continue with the version of this "
            "program that saved it, or start from weights that it exports"
        )
    content = text.rpartition(_OWN.encode())[0]
    if values.pop("sha256", None) != hashlib.sha256(content).hexdigest():
        raise UserError(f"{printable(path)} is damaged: it is not what was written")
    values.pop("metrics", None)  # of checkpoints written before there were `evaluations`
    files = {name: FileDigest(of["bytes"], tuple(of["sha256"])) for name, of in values["files"].items()}
    return Manifest(**{**values, "files": files})


def is_run_id(text: str) -> bool:
    """Whether ``text`` may be the id of a run: ids are used in file names."""
    return _RUN_ID.fullmatch(text) is not None


def step_of(name: str) -> int | None:
    """The step in the name of a checkpoint's directory; None if it is no such name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def open_listed(directory: Location, manifest: Manifest, name: str) -> PlainFile:
    """The file ``name`` of the checkpoint in ``directory``, opened.

    Raises:
        UserError: it cannot be opened, or does not have the size in the manifest.
    """
    try:
        file = opened(directory / name)
    except (UnreachableError, NoAccessError):
        raise
    except UserError as error:
        raise UserError(f"{printable(directory)} is damaged: {error}") from error
    if file.size != (size := manifest.files[name].bytes):
        file.close()
        words = f"{printable(name)} has {file.size} bytes, the manifest says {size}"
        raise UserError(f"{printable(directory)} is damaged: {words}")
    return file


def verify(directory: Location, reader: int = 0, num_readers: int = 1) -> Manifest:
    """Compare the files with the manifest: all blocks, or the ``reader``-th of ``num_readers`` equal parts.

    Four threads hash. This compares bytes only: `open_checkpoint.verified` also reads what they say.

    Raises:
        UserError: naming the first file that differs.
    """
    manifest = read_manifest(directory)
    for name, blocks in blocks_to_verify(manifest, reader, num_readers):
        with open_listed(directory, manifest, name) as file:
            check_blocks(file, manifest.files[name], blocks)
    return manifest


def blocks_to_verify(manifest: Manifest, reader: int, num_readers: int) -> Iterator[tuple[str, range]]:
    """Which blocks of which files a reader verifies: neighbours, so that it opens few files."""
    num_blocks = sum(len(digest.sha256) for digest in manifest.files.values())
    first, last = (number * num_blocks // num_readers for number in (reader, reader + 1))
    for name, digest in sorted(manifest.files.items()):
        if blocks := range(max(0, first), min(last, len(digest.sha256))):
            yield name, blocks
        first, last = first - len(digest.sha256), last - len(digest.sha256)
