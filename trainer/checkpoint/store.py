"""Where checkpoints lie: directories that appear whole or not at all, each proven by its manifest.

A checkpoint is ``root/step_00000100/``. It is filled as ``root/.tmp_step_00000100/``; every file is fsynced,
the manifest (size of each file and sha256 of its blocks) is written last, one rename makes the directory
visible, the parent is fsynced, and only then ``root/latest`` is pointed at it. A kill at any point leaves the
old or the new one whole.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

from trainer.checkpoint.hashing import (
    ALGORITHM,
    BLOCK_BYTES,
    FileDigest,
    check_blocks,
    fsync_directory,
    write_text,
)
from trainer.checkpoint.reading import MissingFileError, PlainFile
from trainer.errors import UserError
from trainer.faults.heartbeat import at_disk
from trainer.files.untrusted import Fields, printable, read_json

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT_VERSION = 2
FORMATS = ("full", "sharded")  # who wrote the tensors: rank 0, or each rank its own
_STEP_NAME = re.compile(r"step_([0-9]{8,})(?:-[0-9]+)?")  # -2: beside one that could not be replaced
_RUN_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")
_MAX_MANIFEST_BYTES = 1 << 24  # of some 4 TB
_YEAR_10000 = 253_402_300_800
_TEMPORARY, _REPLACED = ".tmp_", ".replaced_"


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


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of a run outlive its next save. ``best`` is (metric, "min" or "max")."""

    last: int = 2
    best: tuple[str, str] | None = None
    every: int | None = None


def manifest_text(manifest: Manifest) -> str:
    """The one way to write ``manifest`` down, its own sha256 included, so that no flipped bit goes unseen."""
    content = {
        **asdict(manifest),
        "files": {name: asdict(manifest.files[name]) for name in sorted(manifest.files)},
    }
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps(content, sort_keys=True, indent=1) + "\n"


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the checkpoint in ``directory``; UserError if it is missing, damaged or climbs out."""
    path = directory / MANIFEST
    try:
        with open_file(directory, MANIFEST) as file:
            text = file.read(_MAX_MANIFEST_BYTES)
    except MissingFileError as error:
        raise UserError(f"{printable(directory)} is no checkpoint: it has no {MANIFEST}") from error
    fields = Fields(str(path), read_json(path, text))
    if (version := fields.count("format_version")) != FORMAT_VERSION:
        raise UserError(
            f"{printable(directory)} has format version {version}; {FORMAT_VERSION} is read here: "
            "go on with the version of this program that saved it, or start from weights that it exports"
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
    if text.decode() != manifest_text(manifest):
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
    """Whether it may be one: it comes into the names of files."""
    return _RUN_ID.fullmatch(text) is not None


def _digest(fields: Fields) -> FileDigest:
    digest = FileDigest(fields.count("bytes"), tuple(fields.sequence("sha256", of=str)))
    if len(digest.sha256) != -(-digest.bytes // BLOCK_BYTES):
        fields.refuse("sha256", "one for each block")
    return digest


def open_file(directory: Path, name: str) -> PlainFile:
    """The one place where a file of a checkpoint is opened for reading. UserError as of PlainFile."""
    return PlainFile(directory / name)


def open_listed(directory: Path, manifest: Manifest, name: str) -> PlainFile:
    """The file ``name`` of the checkpoint in ``directory``, as long as its manifest says, or UserError."""
    try:
        file = open_file(directory, name)
    except UserError as error:
        raise UserError(f"{printable(directory)} is damaged: {error}") from error
    if file.size != manifest.files[name].bytes:
        file.close()
        raise UserError(
            f"{printable(directory)} is damaged: {printable(name)} has {file.size} bytes, the manifest says "
            f"{manifest.files[name].bytes}"
        )
    return file


Look = Callable[[str, int, memoryview], None]


def verify(
    directory: Path, part: int = 0, parts: int = 1, look: Look = lambda name, offset, block: None
) -> Manifest:
    """Compare the files with the manifest: all blocks, or every ``parts``-th from ``part`` on.

    ``look`` is given each of these blocks: its file, its place there, and its bytes. Costs one read of the
    files; four threads hash. That they are whole does not mean that they are all there have to be, or that
    they make sense: `source.whole` asks for that too.

    Raises:
        UserError: naming the first file that differs.
    """
    manifest = read_manifest(directory)
    for name in sorted(manifest.files):  # what costs nothing first
        open_listed(directory, manifest, name).close()
    first = part
    for name, digest in sorted(manifest.files.items()):
        blocks = range(first, len(digest.sha256), parts)
        first = (first - len(digest.sha256)) % parts
        if blocks:
            with open_listed(directory, manifest, name) as file:
                check_blocks(file, digest, blocks, functools.partial(look, name))
    return manifest


def seal(temporary: Path, manifest: Manifest) -> None:
    """Write the manifest into the filled ``temporary``, whose files are fsynced: one rename is left to do.

    Raises:
        OSError: it does not hold the files of the manifest and no others; or the disk fails.
    """
    present = {entry.name for entry in temporary.iterdir()}
    if present != set(manifest.files):
        missing, foreign = sorted(set(manifest.files) - present), sorted(present - set(manifest.files))
        raise OSError(
            f"{temporary} lacks {missing[:5]} and holds {foreign[:5]} besides: "
            "is run_dir on a file system that all hosts share?"
        )
    fsync_directory(temporary)
    write_text(temporary / MANIFEST, manifest_text(manifest))
    fsync_directory(temporary)


def appear(temporary: Path, final: Path) -> None:
    """Give the whole ``temporary`` its name, for good."""
    temporary.rename(final)
    fsync_directory(final.parent)


def step_in_name(directory: Path) -> int | None:
    """The step that a directory's name promises; None for a name that promises none."""
    match = _STEP_NAME.fullmatch(directory.resolve().name)
    return int(match[1]) if match else None


class Store:
    """The checkpoints of the run ``run_id`` under ``root``. Only rank 0 writes, renames or deletes here.

    Those of other runs are neither pruned nor replaced. Without ``run_id`` those of all are listed.
    """

    def __init__(self, root: Path, run_id: str | None = None) -> None:
        self.root, self.run_id = root, run_id
        self._filling = root
        self._named: set[Path] = set()

    def path(self, step: int) -> Path:
        return self.root / f"step_{step:08d}"

    @at_disk()
    def begin(self, step: int) -> Path:
        """An empty temporary directory to fill for ``step``."""
        self.root.mkdir(parents=True, exist_ok=True)
        self._sweep()
        self._filling = _unused(self.root / f"{_TEMPORARY}{self.path(step).name}")
        self._filling.mkdir()
        return self._filling

    @at_disk()
    def commit(
        self, step: int, format: str, files: Mapping[str, FileDigest], metrics: Mapping[str, float]
    ) -> Path:
        """Make the directory that was begun, filled and fsynced by now, the checkpoint, and ``latest``."""
        # Should the clock have been set back, the newest is the newest all the same.
        saved_at = max([time.time(), *(_saved_at(path) + 1e-3 for path in self.directories())])
        values = {name: float(value) for name, value in metrics.items()}
        assert self.run_id is not None
        seal(self._filling, Manifest(format, step, saved_at, dict(files), values, self.run_id))
        final = self._vacated(step)
        appear(self._filling, final)
        self._sweep()
        self._point_latest(final.name)
        return final

    def _vacated(self, step: int) -> Path:
        """Where the checkpoint of ``step`` goes: beside the usual place, where that cannot be cleared."""
        final = self.path(step)
        try:
            self._clear(final)
        except OSError as error:  # immutable, say, or a mount point
            beside = _unused(final)
            log.warning("%s cannot be replaced: %s; step %d is saved as %s", final, error, step, beside.name)
            return beside
        return final

    def _clear(self, final: Path) -> None:
        """Another run's checkpoint in the place of a new one gets another name; our own is replaced.

        Ours is an abandoned future, saved before the run went back to an earlier step.
        """
        if not os.path.lexists(final):
            return
        aside = final.with_name(f"{_REPLACED}{final.name}")
        with contextlib.suppress(UserError):  # no checkpoint, or no longer: nothing to lose
            owner = self.run_id if final.is_symlink() else read_manifest(final).run_id
            if owner != self.run_id:
                aside = _unused(final.with_name(f"{final.name}.of_{owner or 'unknown'}"))
                log.warning("%s is another run's, and is now %s", final, aside.name)
        final.rename(aside)

    def _point_latest(self, name: str) -> None:
        link, latest = self.root / f"{_TEMPORARY}latest", self.root / "latest"
        try:
            link.unlink(missing_ok=True)
            link.symlink_to(name)
            if latest.is_dir() and not latest.is_symlink():
                aside = _unused(latest)
                log.warning(
                    "%s is no link, as after a copy that followed links, and is now %s", latest, aside.name
                )
                latest.rename(aside)
            link.replace(latest)
            fsync_directory(self.root)
        except OSError as error:  # there are file systems without links
            self._warn(latest, f"cannot be pointed at the newest checkpoint, which no resume needs: {error}")

    @at_disk()
    def abandon(self, temporary: Path) -> None:
        """Remove what a failed save left. Never raises: the failure itself is the news."""
        shutil.rmtree(temporary, ignore_errors=True)

    def clean(self) -> None:
        """Remove what a killed process left behind, put back a checkpoint caught between two renames, and
        point `latest` at the newest."""
        if not self.root.is_dir():
            return
        self._sweep()
        own, latest = list(self._own()), self.root / "latest"
        may_be_pointed = latest.is_symlink() or not latest.exists()
        if own and may_be_pointed and latest.resolve().name != own[0].name:
            self._point_latest(own[0].name)  # a kill came between a checkpoint's rename and this

    def _sweep(self) -> None:
        """Delete what kills, replacements and failed deletions have left; nothing is being filled now."""
        for entry in list(self.root.iterdir()):
            final = self.root / entry.name.removeprefix(_REPLACED)
            if entry.name.startswith(_TEMPORARY):
                self._delete(entry)
            elif entry != final and final.exists():
                self._condemn(entry)
            elif entry != final:
                try:
                    entry.rename(final)
                except OSError as error:
                    self._warn(entry, f"cannot be put back as {final.name}: {error}")

    def _delete(self, path: Path) -> bool:
        """Delete ``path``; whether it is gone. Never raises: what stays is tried again at the next save."""
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)  # as much as can be
                if path.exists():
                    shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:  # immutable, busy, or NFS keeps a file that somebody has open
            self._warn(path, f"cannot be deleted, which is tried again at each save: {error}")
            return False
        return True

    def _warn(self, path: Path, words: str) -> None:
        """Say once what is in the way of what is no part of a checkpoint."""
        if path not in self._named:
            self._named.add(path)
            log.warning("%s %s", path, words)

    def directories(self) -> list[Path]:
        """Every real ``step_N`` directory (no link), lowest step first."""
        if not self.root.is_dir():
            return []
        found = [
            (int(match[1]), entry)
            for entry in self.root.iterdir()
            if (match := _STEP_NAME.fullmatch(entry.name)) and entry.is_dir() and not entry.is_symlink()
        ]
        return [entry for _, entry in sorted(found)]

    def newest_first(self) -> list[Path]:
        """What this run may go on from, newest first: its own checkpoints.

        The order of saving counts, not the step: a run sent back to step 5 makes its old step 10 an abandoned
        future. A damaged one may be ours, so it is among them.
        """
        found = []
        for path in self.directories():
            try:
                manifest = read_manifest(path)
            except UserError:
                found.append((path.stat().st_mtime, path))
            else:
                if self.run_id in (manifest.run_id, None):
                    found.append((manifest.saved_at, path))
        return [path for _, path in sorted(found, reverse=True)]

    def _own(self) -> dict[Path, Manifest]:
        """Those that bear this run's id, newest first."""
        manifests: dict[Path, Manifest] = {}
        for directory in self.newest_first():
            with contextlib.suppress(UserError):
                manifest = read_manifest(directory)
                if manifest.run_id == self.run_id:
                    manifests[directory] = manifest
        return manifests

    def of_others(self) -> list[Path]:
        """Checkpoints that bear another run's id."""
        found = []
        for path in self.directories():
            with contextlib.suppress(UserError):
                if read_manifest(path).run_id != self.run_id:
                    found.append(path)
        return found

    @at_disk()
    def prune(self, retention: Retention) -> list[Path]:
        """Delete what ``retention`` does not keep of this run's; returns what is gone.

        What has no manifest stays.
        """
        manifests = self._own()
        keep = set(list(manifests)[: retention.last])
        if retention.every is not None:
            keep |= {path for path, m in manifests.items() if m.step % retention.every == 0}
        if retention.best is not None:
            best = _best(manifests, *retention.best)
            keep |= set() if best is None else {best}
        return [path for path in manifests if path not in keep and self._condemn(path)]

    def _condemn(self, path: Path) -> bool:
        """Delete a checkpoint; whether it is gone."""
        condemned = _unused(self.root / f"{_TEMPORARY}{path.name}")
        try:
            path.rename(condemned)  # so that a kill half-way leaves a temporary and not a damaged checkpoint
        except OSError as error:
            self._warn(path, f"cannot be deleted, which is tried again at each save: {error}")
            return False
        return self._delete(condemned)


def _unused(path: Path) -> Path:
    """``path``, or a name beside it where that is taken."""
    beside = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain([path], beside) if not os.path.lexists(each))


def _saved_at(directory: Path) -> float:
    """When a checkpoint was saved; where the manifest is damaged, as near as can be known."""
    try:
        return read_manifest(directory).saved_at
    except UserError:
        return directory.lstat().st_mtime


def _best(manifests: Mapping[Path, Manifest], metric: str, mode: str) -> Path | None:
    scored = [
        (m.metrics[metric], path)
        for path, m in manifests.items()
        if math.isfinite(m.metrics.get(metric, math.nan))
    ]
    return (max if mode == "max" else min)(scored)[1] if scored else None


def best_checkpoint(run_dir: Path, metric: str, mode: str, run_id: str | None = None) -> Path:
    """The checkpoint of a run with the best ``metric``; ``mode`` is min or max. Nothing is verified yet.

    Raises:
        UserError: none was saved with a finite ``metric``.
    """
    manifests = {}
    for directory in Store(run_dir / "checkpoints", run_id).newest_first():
        with contextlib.suppress(UserError):
            manifests[directory] = read_manifest(directory)
    best = _best(manifests, metric, mode)
    if best is None:
        raise UserError(f"{run_dir} has no checkpoint with a finite {metric}")
    return best


def newest_run_id(run_dir: Path) -> str | None:
    """The run that saved last under ``run_dir``; None: there is none."""
    for directory in Store(run_dir / "checkpoints").newest_first():
        with contextlib.suppress(UserError):
            return read_manifest(directory).run_id
    return None
