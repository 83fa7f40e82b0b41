"""Write files, verify them by the hashes of their blocks, and write and read their manifest."""

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
_JOINED_BYTES = 1 << 20  # smaller pieces are joined: a write call costs as much as copying 100 kB


@dataclass(frozen=True)
class FileDigest:
    """The size of a file and the sha256 of each of its blocks.

    With a single sha256 of the whole file, hashing would use only one core, and a partial read could not be
    verified.
    """

    bytes: int
    sha256: tuple[str, ...]


def write_hashed(path: Path, pieces: Iterable[Any]) -> FileDigest:
    """Write a new file, compute its digest at the same time, and fsync the file.

    Args:
        pieces: contiguous buffers, such as bytes, which must not change before the function returns.
    """
    num_bytes, hashes = 0, list[Future[str]]()
    syncing: Future[None] | None = None
    # The thread pool is left before the file is closed, because a thread may still use its descriptor.
    with (
        path.open("xb", buffering=_JOINED_BYTES) as file,
        ThreadPoolExecutor(_NUM_THREADS + 1, thread_name_prefix="checkpoint") as threads,
    ):
        for block in _blocks(pieces):
            if len(hashes) >= _NUM_THREADS:
                hashes[-_NUM_THREADS].result()
            hashes.append(threads.submit(_sha256, block))
            num_bytes += sum(map(len, block))
            with at_disk():  # so that a slow disk is not reported as a hanging rank
                file.writelines(block)
            # Syncing in between keeps the final fsync short.
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
    """Yield the bytes of ``pieces`` in blocks, as lists of views; the last block may be shorter."""
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
    """Check the blocks of ``file`` whose numbers are in ``blocks`` against ``digest``."""

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
            directory, name = printable(file.path.parent), printable(file.path.name)
            raise UserError(f"{directory} is damaged: the sha256 of {name} differs from the manifest")


def write_text(path: Path, text: str) -> FileDigest:
    """Write ``text`` to the new file ``path`` and fsync it."""
    return write_hashed(path, [text.encode()])


def fsync_directory(path: Path) -> None:
    """Flush the directory entries of ``path`` to disk, which an fsync of a file in it does not do."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


MANIFEST = "manifest.json"
FORMAT_VERSION = 5
READ_VERSIONS = (4, 5)  # 4 differs in the index of tensors: see `layout.index_of_version_4`
_OWN_HASH = ', "sha256": "'  # introduces the hash of all text before it
_STEP_NAME = re.compile(r"step_([0-9]{8,})(?:-[0-9]+)?")  # -2: a second checkpoint of the same step
_RUN_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")


@dataclass(frozen=True)
class Manifest:
    """The files and the origin of a checkpoint, with which it can be listed and verified."""

    format: str  # "full": rank 0 wrote all tensors; "sharded": each rank wrote its shards
    step: int
    saved_at: float  # seconds since 1970, by the clock of rank 0
    files: dict[str, FileDigest]
    run_id: str = ""  # of the run that saved it
    branch: str = ""  # of that run: see `evaluations`
    format_version: int = FORMAT_VERSION
    verified: int | None = None  # with train.verify_every, the last step verified at the time of the save

    @property
    def summary(self) -> "Manifest":
        """The manifest without the list of files, whose hashes take megabytes for a large checkpoint."""
        return replace(self, files={})

    @property
    def state(self) -> State:
        return State(self.branch, self.step)

    @property
    def num_bytes(self) -> int:
        return sum(digest.bytes for digest in self.files.values())


def manifest_text(manifest: Manifest) -> str:
    """Return ``manifest`` as JSON that ends with the sha256 of the text before it.

    The JSON is not indented, which would take ten times as long: the manifest of a 1 TB checkpoint contains
    60,000 hashes.
    """
    # dataclasses.asdict would copy each hash and take ten times as long.
    content = {**vars(manifest), "files": {name: vars(digest) for name, digest in manifest.files.items()}}
    if manifest.verified is None:
        del content["verified"]
    text = json.dumps(content, sort_keys=True)[:-1]
    return f'{text}{_OWN_HASH}{hashlib.sha256(text.encode()).hexdigest()}"}}\n'


def read_manifest(directory: Location) -> Manifest:
    """Return the manifest of the checkpoint in ``directory``. Raise UserError if it is missing or damaged."""
    path = directory / MANIFEST
    try:
        with opened(path) as file:
            text = file.read()
    except MissingFileError as error:
        raise UserError(
            f"{printable(directory)} is not a checkpoint: it has no {MANIFEST}; the checkpoints of a run are "
            "in the folder checkpoints of its run directory"
        ) from error
    values = read_json(path, text)
    if (version := values.get("format_version")) not in READ_VERSIONS:
        raise UserError(
            f"{printable(directory)} has format version {printable(version)}, but this version of Ringmaster "
            f"reads {READ_VERSIONS[0]} to {FORMAT_VERSION}: continue with the version that saved it, or "
            "start from weights exported by that version"
        )
    content = text.rpartition(_OWN_HASH.encode())[0]
    if values.pop("sha256", None) != hashlib.sha256(content).hexdigest():
        raise UserError(f"{printable(path)} is damaged: its contents do not match its own sha256")
    values.pop("metrics", None)  # written before evaluations.jsonl existed
    files = {name: FileDigest(file["bytes"], tuple(file["sha256"])) for name, file in values["files"].items()}
    return Manifest(**{**values, "files": files})


def is_run_id(text: str) -> bool:
    """Return whether ``text`` is a valid run id, which is safe in file names."""
    return _RUN_ID.fullmatch(text) is not None


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint's directory; None for any other name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def open_listed(directory: Location, manifest: Manifest, name: str) -> PlainFile:
    """Open the file ``name`` of the checkpoint in ``directory``."""
    try:
        file = opened(directory / name)
    except (UnreachableError, NoAccessError):
        raise
    except UserError as error:
        raise UserError(f"{printable(directory)} is damaged: {error}") from error
    if file.size != (size := manifest.files[name].bytes):
        file.close()
        problem = f"{printable(name)} has {file.size} bytes instead of the {size} in the manifest"
        raise UserError(f"{printable(directory)} is damaged: {problem}")
    return file


def verify(directory: Location, reader: int = 0, num_readers: int = 1) -> Manifest:
    """Verify the files of a checkpoint: this ``reader``'s part, of ``num_readers`` equal parts."""
    manifest = read_manifest(directory)
    for name, blocks in blocks_to_verify(manifest, reader, num_readers):
        with open_listed(directory, manifest, name) as file:
            check_blocks(file, manifest.files[name], blocks)
    return manifest


def blocks_to_verify(manifest: Manifest, reader: int, num_readers: int) -> Iterator[tuple[str, range]]:
    """Yield the files and blocks that a reader verifies; they are consecutive, so that it opens few files."""
    num_blocks = sum(len(digest.sha256) for digest in manifest.files.values())
    first, last = (number * num_blocks // num_readers for number in (reader, reader + 1))
    for name, digest in sorted(manifest.files.items()):
        if blocks := range(max(0, first), min(last, len(digest.sha256))):
            yield name, blocks
        first, last = first - len(digest.sha256), last - len(digest.sha256)
