"""The manifest of a checkpoint: the size of each of its files and the sha256 of their blocks."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from trainer.checkpoint.hashing import ALGORITHM, BLOCK_BYTES, FileDigest, check_blocks
from trainer.checkpoint.reading import MissingFileError, PlainFile, opened
from trainer.errors import UserError
from trainer.files.address import Location, UnreachableError
from trainer.files.untrusted import printable, read_json, reason

MANIFEST = "manifest.json"
FORMAT_VERSION = 3
_OWN = ', "sha256": "'  # before the hash of all that stands before it
FORMATS = ("full", "sharded")  # who wrote the tensors: rank 0, or each rank its own
_STEP_NAME = re.compile(r"step_([0-9]{8,})(?:-[0-9]+)?")  # -2: beside one that could not be replaced
_RUN_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")
_YEAR_10000 = 253_402_300_800


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds: enough to list, rank and verify it without opening its tensors."""

    format: str
    step: int
    saved_at: float  # seconds since 1970, by the clock of rank 0
    files: dict[str, FileDigest]
    metrics: dict[str, float] = field(default_factory=dict)
    run_id: str = ""  # of the run that saved it
    algorithm: str = ALGORITHM
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
    """The manifest of the checkpoint in ``directory``; UserError if it is missing, damaged or unsafe."""
    path = directory / MANIFEST
    try:
        with opened(path) as file:
            text = file.read()
    except MissingFileError as error:
        raise UserError(f"{printable(directory)} is not a checkpoint: it has no {MANIFEST}") from error
    values = read_json(path, text)
    if (version := values.pop("format_version", None)) != FORMAT_VERSION:
        raise UserError(
            f"{printable(directory)} has format version {printable(version)}; {FORMAT_VERSION} is read here: "
            "continue with the version of this program that saved it, or start from weights that it exports"
        )
    content = text.rpartition(_OWN.encode())[0]
    if values.pop("sha256", None) != hashlib.sha256(content).hexdigest():
        raise UserError(f"{printable(path)} is damaged: it is not what was written")
    try:
        files = {name: _digest(of_file) for name, of_file in values.pop("files").items()}
        manifest = Manifest(**values, files=files)
        _check(manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{printable(path)} is damaged: {reason(error)}") from error
    if manifest.format not in FORMATS:
        raise UserError(
            f"{printable(path)} has the format {printable(manifest.format)}, not {' or '.join(FORMATS)}"
        )
    if manifest.algorithm != ALGORITHM:
        raise UserError(f"{printable(path)} has the hash {printable(manifest.algorithm)}, not {ALGORITHM}")
    for name in manifest.files:
        if PurePosixPath(name).name != name or name in ("", "..", MANIFEST) or "\\" in name or "\0" in name:
            raise UserError(
                f"{printable(path)} names the file {printable(name)}: "
                "only plain file names beside it are allowed"
            )
    return manifest


def is_run_id(text: str) -> bool:
    """Whether ``text`` may be the id of a run: ids are used in file names."""
    return _RUN_ID.fullmatch(text) is not None


def _check(manifest: Manifest) -> None:
    """Raise an error unless what others compute with has its type and range."""
    numbers = (manifest.step, manifest.saved_at, *manifest.metrics.values())
    if not all(isinstance(number, int | float) for number in numbers):
        raise TypeError("step, saved_at and metrics must be numbers")
    if not (manifest.step >= 0 and 0 <= manifest.saved_at < _YEAR_10000):
        raise ValueError(f"its step is {manifest.step}, its saved_at {manifest.saved_at}")
    if not is_run_id(manifest.run_id):
        raise ValueError(f"its run_id is {printable(manifest.run_id)}")


def _digest(of_file: Mapping[str, Any]) -> FileDigest:
    digest = FileDigest(of_file["bytes"], tuple(of_file["sha256"]))
    # No save writes an empty file; a manifest of 300,000 takes a minute to check.
    if digest.bytes < 1 or len(digest.sha256) != -(-digest.bytes // BLOCK_BYTES):
        raise ValueError(f"a file of {digest.bytes} bytes has {len(digest.sha256)} hashes")
    return digest


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
    if file.size != manifest.files[name].bytes:
        file.close()
        raise UserError(
            f"{printable(directory)} is damaged: {printable(name)} has {file.size} bytes, the manifest says "
            f"{manifest.files[name].bytes}"
        )
    return file


def verify(directory: Location, reader: int = 0, num_readers: int = 1) -> Manifest:
    """Compare the files with the manifest: all blocks, or every ``num_readers``-th from ``reader`` on.

    Four threads hash. This compares bytes only: `open_checkpoint.verified` also checks that every file that a
    checkpoint needs is listed, and that the contents agree.

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
