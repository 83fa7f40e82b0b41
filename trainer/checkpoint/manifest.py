"""The manifest of a checkpoint: the size of each of its files and the sha256 of their blocks."""

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from trainer.checkpoint.hashing import ALGORITHM, BLOCK_BYTES, FileDigest, check_blocks
from trainer.checkpoint.reading import MissingFileError, PlainFile, opened
from trainer.errors import UserError
from trainer.files.address import Location, UnreachableError
from trainer.files.untrusted import Fields, printable, read_json

MANIFEST = "manifest.json"
FORMAT_VERSION = 2
FORMATS = ("full", "sharded")  # who wrote the tensors: rank 0, or each rank its own
STEP_NAME = re.compile(r"step_([0-9]{8,})(?:-[0-9]+)?")  # -2: beside one that could not be replaced
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
    """``manifest`` as text with its own sha256, so that a changed bit is found."""
    content = _content(manifest)
    return json.dumps({**content, "sha256": _sha256(content)}, sort_keys=True, indent=1) + "\n"


def _content(manifest: Manifest) -> dict[str, Any]:
    # Not by asdict, which copies each hash in ten times the time.
    return {**vars(manifest), "files": {name: vars(digest) for name, digest in manifest.files.items()}}


def _sha256(content: dict[str, Any]) -> str:
    """Of JSON without indents, which Python encodes in a tenth of the time."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: Location) -> Manifest:
    """The manifest of the checkpoint in ``directory``; UserError if it is missing, damaged or unsafe."""
    path = directory / MANIFEST
    try:
        with opened(path) as file:
            text = file.read()
    except MissingFileError as error:
        raise UserError(f"{printable(directory)} is not a checkpoint: it has no {MANIFEST}") from error
    fields = Fields(str(path), read_json(path, text))
    if (version := fields.count("format_version")) != FORMAT_VERSION:
        raise UserError(
            f"{printable(directory)} has format version {version}; {FORMAT_VERSION} is read here: "
            "continue with the version of this program that saved it, or start from weights that it exports"
        )
    files, metrics = fields.mapping("files"), fields.mapping("metrics")
    manifest = Manifest(
        format=fields.text("format"),
        step=fields.count("step"),
        saved_at=fields.number("saved_at"),
        files={name: _digest(files.mapping(name)) for name in files.values},
        metrics={name: metrics.number(name) for name in metrics.values},  # a NaN is one, too
        run_id=fields.text("run_id"),
        algorithm=fields.text("algorithm"),
    )
    if manifest.format not in FORMATS:
        raise UserError(
            f"{printable(path)} has the format {printable(manifest.format)}, not {' or '.join(FORMATS)}"
        )
    if manifest.algorithm != ALGORITHM:
        raise UserError(f"{printable(path)} has the hash {printable(manifest.algorithm)}, not {ALGORITHM}")
    if fields.text("sha256") != _sha256(
        {key: value for key, value in fields.values.items() if key != "sha256"}
    ):
        raise UserError(f"{printable(path)} is damaged: it is not what was written")
    if not 0 <= manifest.saved_at < _YEAR_10000:
        raise UserError(f"{printable(path)} is damaged: saved_at is {manifest.saved_at}")
    if not is_run_id(manifest.run_id):
        raise UserError(f"{printable(path)} is damaged: its run_id is {printable(manifest.run_id)}")
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


def _digest(fields: Fields) -> FileDigest:
    digest = FileDigest(fields.count("bytes"), tuple(fields.sequence("sha256", of=str)))
    if digest.bytes == 0:  # no save writes such a file; a manifest of 300,000 takes a minute to check
        fields.refuse("bytes", "1 or more")
    if len(digest.sha256) != -(-digest.bytes // BLOCK_BYTES) or {*map(len, digest.sha256)} != {64}:
        fields.refuse("sha256", "64 digits for each block")
    return digest


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


def step_in_name(directory: Location) -> int | None:
    """The step in a directory's name; None if it has none."""
    match = STEP_NAME.fullmatch(directory.resolve().name)
    return int(match[1]) if match else None
