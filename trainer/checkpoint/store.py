"""Where checkpoints lie: directories that appear whole or not at all, each proven by its manifest.

A checkpoint is ``root/step_00000100/``. It is filled as ``root/.tmp_step_00000100/``; every file is fsynced,
the manifest (sha256 and size of each file) is written last, one rename makes the directory visible, the
parent is fsynced, and only then ``root/latest`` is pointed at it. A kill at any point leaves the old or the
new one whole.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

from trainer.checkpoint.hashing import FileDigest, digest_of, fsync_directory, write_text
from trainer.errors import UserError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_STEP_NAME = re.compile(r"step_(\d{8,})")
_TEMPORARY, _REPLACED = ".tmp_", ".replaced_"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds: enough to list, rank and verify it without opening its tensors."""

    format: str
    step: int
    saved_at: float  # seconds since 1970, by the clock of rank 0
    files: dict[str, FileDigest]
    metrics: dict[str, float] = field(default_factory=dict)
    run_id: str | None = None  # of the run that saved it; None: from before runs had ids
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
    if manifest.run_id is None:
        del content["run_id"]
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps(content, sort_keys=True, indent=1) + "\n"


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the checkpoint in ``directory``; UserError if it is missing, damaged or climbs out."""
    path = directory / MANIFEST
    try:
        text = path.read_text()
        raw = json.loads(text)
        manifest = Manifest(
            format=str(raw["format"]),
            step=int(raw["step"]),
            saved_at=float(raw["saved_at"]),
            files={
                k: FileDigest(str(file["sha256"]), int(file["bytes"])) for k, file in raw["files"].items()
            },
            metrics={name: float(value) for name, value in raw["metrics"].items()},
            run_id=str(raw["run_id"]) if "run_id" in raw else None,
            format_version=int(raw["format_version"]),
        )
        intact = text == manifest_text(manifest)
    except FileNotFoundError as error:
        raise UserError(f"{directory} is no checkpoint: it has no {MANIFEST}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged: {error!r}") from error
    if manifest.format_version != FORMAT_VERSION:
        raise UserError(
            f"{directory} has format version {manifest.format_version}; {FORMAT_VERSION} is read here"
        )
    if not intact:
        raise UserError(f"{path} is damaged: it is not what was written")
    for name in manifest.files:
        if PurePosixPath(name).name != name or name in ("", "..", MANIFEST) or "\\" in name or "\0" in name:
            raise UserError(f"{path} names the file {name!r}: only plain file names beside it are allowed")
    return manifest


def verify(directory: Path, part: int = 0, parts: int = 1) -> Manifest:
    """Compare the files with the manifest's sizes and sha256: all, or every ``parts``-th from ``part`` on.

    Costs one read of the files, about 0.6 s per GB and core.

    Raises:
        UserError: naming the first file that differs.
    """
    manifest = read_manifest(directory)
    chosen = sorted(manifest.files)[part::parts]
    for name in chosen:  # what costs nothing first
        try:
            status = (directory / name).lstat()
        except OSError as error:
            raise UserError(
                f"{directory} is damaged: {name} is missing or unreadable ({error.strerror})"
            ) from error
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{directory} is damaged: {name} is no plain file")
        if status.st_size != manifest.files[name].bytes:
            raise UserError(
                f"{directory} is damaged: {name} has {status.st_size} bytes, the manifest says "
                f"{manifest.files[name].bytes}"
            )
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        for name, digest in zip(
            chosen, pool.map(lambda name: digest_of(directory / name), chosen), strict=True
        ):
            if digest != manifest.files[name]:
                raise UserError(f"{directory} is damaged: the sha256 of {name} is not the manifest's")
    return manifest


def seal(temporary: Path, final: Path, manifest: Manifest) -> None:
    """Make the filled directory ``temporary``, its files fsynced, the checkpoint ``final`` beside it.

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
    replaced = final.with_name(f"{_REPLACED}{final.name}")
    if os.path.lexists(final):  # an abandoned future, saved before the run went back to an earlier step
        final.rename(replaced)
    temporary.rename(final)
    fsync_directory(final.parent)
    if replaced.is_symlink():
        replaced.unlink()
    elif replaced.exists():
        shutil.rmtree(replaced)


class Store:
    """The checkpoints of the run ``run_id`` under ``root``. Only rank 0 writes, renames or deletes here.

    Those of other runs, and those from before runs had ids, are neither pruned nor replaced.
    """

    def __init__(self, root: Path, run_id: str | None = None) -> None:
        self.root, self.run_id = root, run_id

    def path(self, step: int) -> Path:
        return self.root / f"step_{step:08d}"

    def temporary(self, step: int) -> Path:
        return self.root / f"{_TEMPORARY}{self.path(step).name}"

    def begin(self, step: int) -> Path:
        """An empty temporary directory to fill for ``step``."""
        self.root.mkdir(parents=True, exist_ok=True)
        directory = self.temporary(step)
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir()
        return directory

    def commit(
        self, step: int, format: str, files: Mapping[str, FileDigest], metrics: Mapping[str, float]
    ) -> Path:
        """Make the filled and fsynced temporary directory of ``step`` the checkpoint, and ``latest``."""
        final = self.path(step)
        # Should the clock have been set back, the newest is the newest all the same.
        saved_at = max([time.time(), *(_saved_at(path) + 1e-3 for path in self.directories())])
        values = {name: float(value) for name, value in metrics.items()}
        self._make_way(final)
        manifest = Manifest(format, step, saved_at, dict(files), values, self.run_id)
        seal(self.temporary(step), final, manifest)
        self._point_latest(final.name)
        return final

    def _make_way(self, final: Path) -> None:
        """Another run's checkpoint in the place of a new one gets another name; our own is replaced."""
        if final.is_symlink() or not final.is_dir():
            return
        try:
            owner = read_manifest(final).run_id
        except UserError:
            return  # no checkpoint, or no longer: nothing to lose
        if owner != self.run_id:
            aside = final.with_name(f"{final.name}.of_{owner or 'unknown'}")
            log.warning("%s is another run's, and is now %s", final, aside.name)
            final.rename(aside)

    def _point_latest(self, name: str) -> None:
        link = self.root / f"{_TEMPORARY}latest"
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        link.replace(self.root / "latest")
        fsync_directory(self.root)

    def abandon(self, step: int) -> None:
        """Remove what a failed save left. Never raises: the failure itself is the news."""
        shutil.rmtree(self.temporary(step), ignore_errors=True)

    def clean(self) -> None:
        """Remove what a killed process left behind, and put back a checkpoint caught between two renames."""
        if not self.root.is_dir():
            return
        for entry in self.root.iterdir():
            if entry.name.startswith(_REPLACED):
                final = self.root / entry.name.removeprefix(_REPLACED)
                if final.exists():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.rename(final)
            elif entry.name.startswith(_TEMPORARY):
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)

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
        """What this run may go on from, newest first: its own checkpoints, then those that bear no run's id.

        Among them the order of saving counts, not the step: a run sent back to step 5 makes its old step 10
        an abandoned future. A damaged one may be ours, so it is among them.
        """
        found = []
        for path in self.directories():
            try:
                manifest = read_manifest(path)
            except UserError:
                found.append((True, path.stat().st_mtime, path))
            else:
                if self.run_id is None or manifest.run_id in (self.run_id, None):
                    found.append((manifest.run_id == self.run_id, manifest.saved_at, path))
        return [path for *_, path in sorted(found, reverse=True)]

    def of_others(self) -> dict[Path, str | None]:
        """Checkpoints that bear another run's id, or none."""
        owners: dict[Path, str | None] = {}
        for path in self.directories():
            with contextlib.suppress(UserError):
                owners[path] = read_manifest(path).run_id
        return {path: owner for path, owner in owners.items() if owner != self.run_id}

    def prune(self, retention: Retention) -> list[Path]:
        """Delete what ``retention`` does not keep of this run's; returns it. Without a manifest it stays."""
        manifests: dict[Path, Manifest] = {}
        for directory in self.newest_first():
            with contextlib.suppress(UserError):
                manifest = read_manifest(directory)
                if manifest.run_id == self.run_id:
                    manifests[directory] = manifest
        keep = set(list(manifests)[: retention.last])
        if retention.every is not None:
            keep |= {path for path, m in manifests.items() if m.step % retention.every == 0}
        if retention.best is not None:
            metric, mode = retention.best
            scored = [
                (m.metrics[metric], path)
                for path, m in manifests.items()
                if math.isfinite(m.metrics.get(metric, math.nan))
            ]
            if scored:
                keep.add((max if mode == "max" else min)(scored)[1])
        doomed = [path for path in manifests if path not in keep]
        for path in doomed:
            # Renamed first, so that a kill half-way leaves a temporary and not a damaged checkpoint.
            condemned = self.root / f"{_TEMPORARY}{path.name}"
            path.rename(condemned)
            shutil.rmtree(condemned)
        return doomed


def _saved_at(directory: Path) -> float:
    """When a checkpoint was saved; where the manifest is damaged, as near as can be known."""
    try:
        return read_manifest(directory).saved_at
    except UserError:
        return directory.stat().st_mtime


def newest_run_id(run_dir: Path) -> str | None:
    """The run that saved last under ``run_dir``; None: there is none, or it had no id."""
    for directory in Store(run_dir / "checkpoints").newest_first():
        with contextlib.suppress(UserError):
            return read_manifest(directory).run_id
    return None
