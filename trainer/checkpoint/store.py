"""The directories of checkpoints, which appear complete or not at all.

A checkpoint is ``root/step_00000100/``. Its files are written to ``root/.tmp_step_00000100/`` and fsynced.
The manifest, with the size of each file and the sha256 of its blocks, is written last. Then the directory is
renamed, and its parent is fsynced. A kill at any point leaves the old or the new one complete. Nothing is
replaced: a step saved twice, as after a resume from an older one, is also in ``step_00000100-2``, until the
first of the two is pruned.
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
    """Write the manifest into ``temporary``, which has all files, fsynced. Then only a rename is left to do.

    Raises:
        UserError: its files are not those of the manifest.
        OSError: the disk fails.
    """
    present = {entry.name for entry in temporary.iterdir()}
    if present != set(manifest.files):
        missing, foreign = sorted(set(manifest.files) - present), sorted(present - set(manifest.files))
        raise UserError(
            f"{temporary} lacks {first_few(missing) or 'nothing'}, and also "
            f"holds {first_few(foreign) or 'nothing'}: is run_dir on a file system that all hosts share?"
        )
    fsync_directory(temporary)
    write_text(temporary / MANIFEST, manifest_text(manifest))
    fsync_directory(temporary)


def appear(temporary: Path, final: Path) -> None:
    """Give the complete ``temporary`` its final name, durably."""
    temporary.rename(final)
    fsync_directory(final.parent)


class Store(Listing[Path]):
    """The checkpoints of the run ``run_id`` under ``root``. Only rank 0 writes, renames or deletes here.

    It does not prune those of other runs.

    Args:
        shared: another process may still write here: what it has not finished is left to the next start.

    Attributes:
        saved_after: the time of the checkpoint that the run goes on from, in seconds since 1970. It may be at
            an address; the clock of this machine may be behind that of the machine that saved it.
    """

    def __init__(self, root: Path, run_id: str | None = None, shared: bool = False) -> None:
        super().__init__(root, run_id)
        self._shared = shared
        self.saved_after = 0.0
        self._filling, self._begun_at = root, 0.0
        self._warned: set[Path] = set()

    @at_disk()
    def new_directory(self, step: int) -> Path:
        """An empty temporary directory to fill for ``step``."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.recover()
        # Not the time of `commit`: a save at a fault may overtake one that is being written. If the clock was
        # set back, the newest must still have the latest time.
        before = max([self.saved_after, *map(self._saved_at, self.directories())])
        self._begun_at = max(time.time(), before + 1e-3)
        self._filling = unused_path(self.root / f"{_TEMPORARY}step_{step:08d}")
        self._filling.mkdir()
        return self._filling

    @at_disk()
    def commit(
        self,
        step: int,
        format: str,
        files: Mapping[str, FileDigest],
        branch: str,
    ) -> Path:
        """Make the ``new_directory``, with all files fsynced, the checkpoint of ``step``.

        Returns its path. Raises as `seal`.
        """
        assert self.run_id is not None
        manifest = Manifest(format, step, self._begun_at, dict(files), self.run_id, branch)
        seal(self._filling, manifest)
        final = unused_path(self.root / f"step_{step:08d}")
        appear(self._filling, final)
        self._known[final] = manifest.summary
        return final

    def recover(self) -> None:
        """Delete what kills and failed deletions left. Called when nothing is being written."""
        if not self._shared:
            for entry in self.root.glob(f"{_TEMPORARY}*"):
                self._delete(entry)

    def _delete(self, path: Path, renamed: Path | None = None) -> None:
        """Delete ``path``, first ``renamed``. Where it cannot be, told once, the next save tries again."""
        try:
            if renamed is not None:
                self._known.pop(path, None)
                path = path.rename(renamed)
            shutil.rmtree(path, ignore_errors=True)  # as much as possible
            if path.exists():
                shutil.rmtree(path)
        except OSError as error:  # immutable, busy, or NFS keeps a file that is open elsewhere
            if path not in self._warned:
                self._warned.add(path)
                log.warning("%s cannot be deleted, which is tried again at each save: %s", path, error)

    @at_disk()
    def prune(self, settings: CheckpointConfig, evaluations: Evaluations, spared: Path | None = None) -> None:
        """Delete checkpoints of this run that ``settings`` do not keep, except ``spared``.

        A directory without a manifest stays. Each is renamed first: a kill leaves no half of a checkpoint.
        """
        for path in self.to_prune(settings, evaluations):
            if path != spared:
                self._delete(path, unused_path(self.root / f"{_TEMPORARY}{path.name}"))

    def _saved_at(self, directory: Path) -> float:
        """When it was saved, in seconds since 1970; its directory's time if its manifest cannot tell."""
        try:
            return self.manifest(directory).saved_at
        except (UserError, RetryableError):
            return directory.lstat().st_mtime
