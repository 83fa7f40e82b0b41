"""The manifest of a checkpoint: the size of each of its files and the sha256 of their blocks."""

import hashlib
import json
import re
from dataclasses import dataclass, field

from trainer.checkpoint.hashing import FileDigest, check_blocks
from trainer.checkpoint.reading import MissingFileError, PlainFile, opened
from trainer.errors import UserError
from trainer.files.address import Location, UnreachableError
from trainer.files.untrusted import printable, read_json

MANIFEST = "manifest.json"
FORMAT_VERSION = 4
_OWN = ', "sha256": "'  # before the hash of all that stands before it
_STEP_NAME = re.compile(r"step_([0-9]{8,})(?:-[0-9]+)?")  # -2: beside another of this step
_RUN_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds: enough to list, rank and verify it without opening its tensors."""

    format: str  # full or sharded: who wrote the tensors, rank 0 or each rank its own
    step: int
    saved_at: float  # seconds since 1970, by the clock of rank 0
    files: dict[str, FileDigest]
    metrics: dict[str, float] = field(default_factory=dict)
    run_id: str = ""  # of the run that saved it
    format_version: int = FORMAT_VERSION

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
        raise UserError(f"{printable(directory)} is not a checkpoint: it has no {MANIFEST}") from error
    values = read_json(path, text)
    if (version := values.get("format_version")) != FORMAT_VERSION:
        raise UserError(
            f"{printable(directory)} has format version {printable(version)}; {FORMAT_VERSION} is read here: "
            "continue with the version of this program that saved it, or start from weights that it exports"
        )
    content = text.rpartition(_OWN.encode())[0]
    if values.pop("sha256", None) != hashlib.sha256(content).hexdigest():
        raise UserError(f"{printable(path)} is damaged: it is not what was written")
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
    except UnreachableError:
        raise
    except UserError as error:
        raise UserError(f"{printable(directory)} is damaged: {error}") from error
    if file.size != (size := manifest.files[name].bytes):
        file.close()
        words = f"{printable(name)} has {file.size} bytes, the manifest says {size}"
        raise UserError(f"{printable(directory)} is damaged: {words}")
    return file


def verify(directory: Location, reader: int = 0, num_readers: int = 1) -> Manifest:
    """Compare the files with the manifest: all blocks, or every ``num_readers``-th from ``reader`` on.

    Four threads hash. This compares bytes only: `open_checkpoint.verified` also reads what they say.

    Raises:
        UserError: naming the first file that differs.
    """
    manifest = read_manifest(directory)
    for name in sorted(manifest.files):  # the fast check first
        open_listed(directory, manifest, name).close()
    first = reader  # block of the next file: blocks are counted through all files
    for name, digest in sorted(manifest.files.items()):
        blocks = range(first, len(digest.sha256), num_readers)
        first = (first - len(digest.sha256)) % num_readers
        if blocks:
            with open_listed(directory, manifest, name) as file:
                check_blocks(file, digest, blocks)
    return manifest
