"""List the checkpoints of a run in a directory or at a URL, and choose which to keep or to use."""

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

from trainer.checkpoint.evaluations import Evaluations, State
from trainer.checkpoint.manifest import MANIFEST, Manifest, read_manifest, step_of
from trainer.config import CheckpointConfig, KeepBest
from trainer.errors import NoAccessError, RetryableError, UserError, kind_of
from trainer.files.address import Address, Location, UnreachableError
from trainer.files.untrusted import load_json, printable
from trainer.files.writing import atomic_file

log = logging.getLogger(__name__)

P = TypeVar("P", Path, Address)
SET_ASIDE = "set_aside.json"


@dataclass(frozen=True)
class SetAside:
    """Checkpoints to skip unless the user gives their path, because a faulty device may have written them.

    They stay on disk.

    Attributes:
        after: the last usable step of each branch of the run.
        why: what was wrong.
        start: the checkpoint in another run directory from which the run started, if any.
    """

    after: Mapping[str, int] = field(default_factory=dict)
    why: str = ""
    start: str | None = None

    @classmethod
    def read(cls, run_dir: Location) -> "SetAside":
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return cls(**load_json(run_dir / SET_ASIDE))
        return cls()

    def write(self, run_dir: Path) -> None:
        with atomic_file(run_dir / SET_ASIDE) as file:
            file.write(json.dumps(vars(self), indent=2).encode() + b"\n")

    def contains(self, state: State) -> bool:
        return state.step > self.after.get(state.branch, state.step)


@dataclass(frozen=True)
class ListedCheckpoint(Generic[P]):
    """A checkpoint in a listing; ``manifest`` is None if it is damaged."""

    saved_at: float  # in seconds since 1970
    path: P
    manifest: Manifest | None


class Listing(Generic[P]):
    """The checkpoints of the run ``run_id`` under ``root``, or of all runs if ``run_id`` is None."""

    def __init__(self, root: P, run_id: str | None = None) -> None:
        self.root: P = root
        self.run_id = run_id
        self._known: dict[P, Manifest] = {}  # a complete checkpoint never changes

    def manifest(self, path: P) -> Manifest:
        """Return the `summary` of the manifest at ``path``. Raises the errors of `read_manifest`.

        It is cached, because all ranks wait while it is parsed, which takes 0.1 s for a 1 TB checkpoint.
        """
        if path not in self._known:
            self._known[path] = read_manifest(path).summary
        return self._known[path]

    @property
    def aside(self) -> SetAside:
        """The checkpoints in the run directory to skip unless the user gives their path."""
        return SetAside.read(self.root.parent)

    def forget(self, path: P) -> None:
        """Remove ``path``, which is being deleted, from the cache."""
        self._known.pop(path, None)

    def directories(self) -> list[P]:
        """Return every ``step_N`` directory of any run, except links, in ascending order of steps.

        Raises:
            UserError: if ``root`` is not a directory or access is denied.
            RetryableError: if ``root`` cannot be read now.
        """
        try:
            if not self.root.is_dir():
                if isinstance(self.root, Path) and os.path.lexists(self.root):
                    raise UserError(
                        f"{printable(self.root)} is a file or a broken link; check that its disk is mounted"
                    )
                return []
            entries = [
                (step, entry.name, entry)
                for entry in self.root.iterdir()
                if (step := step_of(entry.name)) is not None and entry.is_dir() and not entry.is_symlink()
            ]
        except OSError as error:
            message = f"{printable(self.root)} cannot be read ({error.strerror or error})"
            raise kind_of(error)(message) from error
        return [entry for _, _, entry in sorted(entries, key=lambda each: each[:2])]

    def checkpoints(self) -> list[ListedCheckpoint[P]]:
        """Return this run's checkpoints and all damaged ones, which may belong to it, newest first.

        Checkpoints in `aside` are omitted. The others are sorted by the time of the save, not by step: after
        a run was resumed from step 5, its earlier step 10 is older than its new step 6.

        Raises:
            RetryableError, NoAccessError: if the disk or the store does not answer, or denies access.
        """
        checkpoints: list[ListedCheckpoint[P]] = []
        paths, aside = self.directories(), self.aside
        self._known = {path: self._known[path] for path in paths if path in self._known}
        for path in paths:
            try:
                manifest = self.manifest(path)
            except (UnreachableError, NoAccessError):
                raise
            except UserError:
                with contextlib.suppress(FileNotFoundError):  # the run may just have deleted it
                    checkpoints.append(
                        ListedCheckpoint(path.stat().st_mtime if isinstance(path, Path) else 0.0, path, None)
                    )
            else:
                if self.run_id in (manifest.run_id, None) and not aside.contains(manifest.state):
                    checkpoints.append(ListedCheckpoint(manifest.saved_at, path, manifest))
        return sorted(checkpoints, key=attrgetter("saved_at"), reverse=True)

    def own(self) -> dict[P, Manifest]:
        """Return the manifests of the undamaged checkpoints of this run, newest first."""
        return {each.path: each.manifest for each in self.checkpoints() if each.manifest is not None}

    def to_prune(self, settings: CheckpointConfig, evaluations: Evaluations) -> list[P]:
        """Return the checkpoints of this run that no ``keep_...`` setting retains.

        If a step was saved twice, only the later checkpoint is retained: a resume may have found the earlier
        one damaged. With `train.verify_every`, the newest verified checkpoint is retained.
        """
        own = self.own()
        newest = {manifest.step: path for path, manifest in reversed(own.items())}
        manifests = {path: manifest for path, manifest in own.items() if newest[manifest.step] == path}
        keep = set(list(manifests)[: settings.keep_last])
        if settings.keep_every is not None:
            keep |= {path for path, m in manifests.items() if m.step % settings.keep_every == 0}
        if settings.keep_best is not None:
            keep |= set(best_of(own, settings.keep_best, evaluations))
        verified = next((manifest.verified for manifest in manifests.values()), None)
        if verified is not None:
            keep |= set([path for path, m in manifests.items() if m.step <= verified][:1])
        return [path for path in own if path not in keep]


def all_checkpoints(own: Listing[Any], remote: str | None) -> list[ListedCheckpoint[Any]]:
    """Return the checkpoints of ``own`` and of ``remote`` (`checkpoint.remote`), newest first.

    If both have a checkpoint, the one in ``own`` comes first. Folders in ``remote`` without a manifest are
    skipped: their upload was never completed.
    """
    checkpoints: list[ListedCheckpoint[Any]] = list(own.checkpoints())
    if remote is None:
        return checkpoints
    try:
        for each in Listing(Address(remote) / "checkpoints", own.run_id).checkpoints():
            if each.manifest is None and not (each.path / MANIFEST).exists():
                log.warning("skipping %s: its upload was never completed", printable(each.path))
            else:
                checkpoints.append(each)
    except (UserError, RetryableError) as error:
        if not checkpoints:
            raise
        log.warning("%s; using only the checkpoints in %s", error, own.root)
    return sorted(checkpoints, key=attrgetter("saved_at"), reverse=True)


def newest_run_id(run_dir: Location) -> str | None:
    """Return the id of the run that saved the newest checkpoint under ``run_dir``; None if there is none."""
    listing: Listing[Any] = Listing(run_dir / "checkpoints")
    return next((manifest.run_id for manifest in listing.own().values()), None)


def best_of(own: Mapping[P, Manifest], best: KeepBest, evaluations: Evaluations) -> list[P]:
    """Return the paths of all checkpoints of the best state; [] if no state was evaluated.

    Only the state of the newest checkpoint and the ancestors of that state count.

    Args:
        own: the manifests of a run's checkpoints, newest first.
    """
    states = {path: evaluations.owner(manifest.state) for path, manifest in own.items()}
    newest = next(iter(states.values()), None)
    chosen = evaluations.best(newest, best, states.values()) if newest is not None else None
    return [path for path, state in states.items() if state == chosen]
