"""The directory of a run's checkpoints, which are created atomically.

A checkpoint is ``root/step_00000100/``. Its files are written to ``root/.tmp_step_00000100/`` and fsynced.
The manifest, with the size of each file and the sha256 of its blocks, is written last. Then the directory is
renamed, and its parent is fsynced. If the process is killed at any point, all complete checkpoints remain.
Checkpoints are never replaced: if a step is saved twice, for example after a resume from an older checkpoint,
the second checkpoint is ``step_00000100-2`` if the first still exists.
"""

import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from trainer.checkpoint.evaluations import Evaluations
from trainer.checkpoint.listing import Listing
from trainer.checkpoint.manifest import (
    MANIFEST,
    FileDigest,
    Manifest,
    fsync_directory,
    manifest_text,
    write_text,
)
from trainer.config import CheckpointConfig
from trainer.errors import RetryableError, UserError, first_few
from trainer.failures.heartbeat import at_disk
from trainer.files.writing import unused_path

log = logging.getLogger(__name__)

_TEMPORARY = ".tmp_"


def seal(temporary: Path, manifest: Manifest) -> None:
    """Write the manifest to ``temporary``, which contains all other files, and fsync both.

    Raises:
        UserError: if the files are not those in the manifest.
    """
    present = {entry.name for entry in temporary.iterdir()}
    if present != set(manifest.files):
        missing, unexpected = sorted(set(manifest.files) - present), sorted(present - set(manifest.files))
        raise UserError(
            f"the files in {temporary} differ from the manifest (missing: {first_few(missing) or 'none'}; "
            f"unexpected: {first_few(unexpected) or 'none'}); set run_dir to a directory on a file system "
            "that all hosts share"
        )
    fsync_directory(temporary)
    write_text(temporary / MANIFEST, manifest_text(manifest))
    fsync_directory(temporary)


def publish(temporary: Path, final: Path) -> None:
    """Rename the complete directory ``temporary`` to ``final``, and fsync its parent."""
    temporary.rename(final)
    fsync_directory(final.parent)


class Store(Listing[Path]):
    """The checkpoints of the run ``run_id`` under ``root``, where only rank 0 renames or deletes directories.

    Args:
        shared: whether another process may be writing to ``root``, so that its partial files must be kept.

    Attributes:
        saved_after: the time of the checkpoint that the run resumed from, in seconds since 1970. It may be
            ahead of this machine's clock, because another machine may have saved that checkpoint.
    """

    def __init__(self, root: Path, run_id: str | None = None, shared: bool = False) -> None:
        super().__init__(root, run_id)
        self._shared = shared
        self.saved_after = 0.0
        self._temporary, self._started_at = root, 0.0
        self._warned: set[Path] = set()

    @at_disk()
    def new_directory(self, step: int) -> Path:
        """Create an empty temporary directory for the files of ``step``, and return its path."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.recover()
        # The time of the start, not of `commit`, because a save on failure may overtake a save in progress.
        # Even if the clock was set back, the newest checkpoint must have the latest time.
        last = max([self.saved_after, *map(self._saved_at, self.directories())])
        self._started_at = max(time.time(), last + 1e-3)
        self._temporary = unused_path(self.root / f"{_TEMPORARY}step_{step:08d}")
        self._temporary.mkdir()
        return self._temporary

    @at_disk()
    def commit(
        self,
        step: int,
        format: str,
        files: Mapping[str, FileDigest],
        branch: str,
        verified: int | None = None,
    ) -> Path:
        """Turn the ``new_directory``, whose files are fsynced, into the checkpoint of ``step``."""
        assert self.run_id is not None
        manifest = Manifest(
            format, step, self._started_at, dict(files), self.run_id, branch, verified=verified
        )
        seal(self._temporary, manifest)
        final = unused_path(self.root / f"step_{step:08d}")
        publish(self._temporary, final)
        self._known[final] = manifest.summary
        return final

    def recover(self) -> None:
        """Delete the partial files of interrupted saves and deletions. Do not call it during a save."""
        if not self._shared:
            for entry in self.root.glob(f"{_TEMPORARY}*"):
                self._delete(entry)

    def _delete(self, path: Path, renamed: Path | None = None) -> None:
        """Delete ``path``, after renaming it to ``renamed`` if given. Log the first failure for each path."""
        try:
            if renamed is not None:
                self._known.pop(path, None)
                path = path.rename(renamed)
            shutil.rmtree(path, ignore_errors=True)  # delete as much as possible
            if path.exists():
                shutil.rmtree(path)
        except OSError as error:  # immutable, busy, or open elsewhere on NFS
            if path not in self._warned:
                self._warned.add(path)
                log.warning("failed to delete %s (%s); each save will retry", path, error)

    @at_disk()
    def prune(self, settings: CheckpointConfig, evaluations: Evaluations, spared: Path | None = None) -> None:
        """Delete checkpoints of this run that no ``keep_...`` setting retains, except ``spared``.

        Directories without a manifest are kept. Each checkpoint is renamed first, so an interrupted deletion
        leaves no partial checkpoint.
        """
        for path in self.to_prune(settings, evaluations):
            if path != spared:
                self._delete(path, unused_path(self.root / f"{_TEMPORARY}{path.name}"))

    def _saved_at(self, directory: Path) -> float:
        try:
            return self.manifest(directory).saved_at
        except (UserError, RetryableError):
            return directory.lstat().st_mtime
