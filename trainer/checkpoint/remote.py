"""Upload checkpoints, in a thread of rank 0, to a URL (address) that survives the loss of the machine.

The address contains the files of a run directory: config.yaml, metrics.jsonl, evaluations.jsonl, result.json,
run.json, and checkpoints/step_N. run.json contains the id of the run, and the launch that owns the address:
the launch that started last. The manifest of a checkpoint is uploaded after its other files, and a folder
without a manifest is not a checkpoint.

Before each file, the launch checks that run.json still contains its own entry, so a launch that was wrongly
considered dead stops uploading when another launch has resumed its run. An upload in progress may still
arrive hours later, so each launch uploads checkpoints to separate folders: the second launch to step_N-2.
"""

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

from trainer.checkpoint.evaluations import FILE as EVALUATIONS
from trainer.checkpoint.evaluations import Evaluations
from trainer.checkpoint.listing import SET_ASIDE, Listing, best_of, newest_run_id
from trainer.checkpoint.manifest import MANIFEST, Manifest, is_run_id, manifest_text, read_manifest
from trainer.config import CheckpointConfig
from trainer.errors import RetryableError, UserError, kind_of
from trainer.files.address import Address, UnreachableError
from trainer.files.untrusted import printable, read_json, reason
from trainer.files.writing import atomic_file

log = logging.getLogger(__name__)

OWNER = "run.json"
METRICS = "metrics.jsonl"
_SMALL_FILES = ("config.yaml", METRICS, EVALUATIONS, "result.json", SET_ASIDE)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LAST_PAUSE_S = 1.0, 60.0, 5.0
_NUM_THREADS = 4  # files that are uploaded at the same time
_SET_ASIDE_S = 10.0  # the longest wait, because the launcher ends a failed run soon


class TakenError(UserError):
    """The address belongs to another run, or another launch continues this run there."""


class NoRemote:
    """The interface of `Remote`, for runs without `checkpoint.remote` and ranks other than 0.

    Attributes:
        copying: the checkpoint that is being uploaded, which must not be deleted.
    """

    copying: Path | None = None

    def follow(self, step: int = 0) -> None:
        """Upload changed files and, if given, the checkpoint of `step`, which must be complete on disk."""

    def metrics(self) -> dict[str, float]:
        """Return by how many steps the uploads lag behind the run directory, for the log."""
        return {}

    def put_set_aside(self) -> None:
        """Upload set_aside.json immediately, because the run is about to fail."""

    def finish(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until everything is uploaded, and log the result."""


class Remote(NoRemote):
    """Uploads the newest and the best checkpoint, in a thread that never delays training."""

    def __init__(
        self, address: Address, local: Listing[Path], settings: CheckpointConfig, evaluations: Evaluations
    ) -> None:
        self._address, self._local = address, local
        self._settings, self._evaluations = settings, evaluations
        self._uploaded = Listing(address / "checkpoints", local.run_id)
        self._session = secrets.token_hex(8)  # identifies this launch of the run
        self._number = 0  # of this launch of the run, counted from 1; 0 until it is known
        self._changed = threading.Condition()
        self._requested = self._done = 0  # number of calls of `follow`, and how many of them are complete
        self._newest_step = self._safe_step = 0  # the newest on disk, and the newest at the address
        self._longest_pause_s = _LONGEST_PAUSE_S
        self._problem: str | None = None  # why the last attempt failed
        self._thread: threading.Thread | None = None
        self._has_started = False  # whether run.json has named this launch
        self._is_taken = False  # whether another run or launch owns the address, so that this one stopped

    def follow(self, step: int = 0) -> None:
        with self._changed:
            self._newest_step = step or self._newest_step
            self._requested += 1
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="remote", daemon=True)
            self._thread.start()

    def metrics(self) -> dict[str, float]:
        return {"usage/remote_behind": float(max(0, self._newest_step - self._safe_step))}

    def finish(self, timeout_s: float) -> None:
        if self._safe_step < self._newest_step and not self._is_taken:
            log.info(
                "%s: waiting up to %.0f s for the upload of step %d",
                *(self._address, timeout_s, self._newest_step),
            )
        self._longest_pause_s = _LAST_PAUSE_S
        self.follow()
        with self._changed:
            self._changed.wait_for(lambda: self._is_taken or self._done == self._requested, timeout_s)
        contents = f"{self._address} contains step {self._safe_step}"
        if self._done == self._requested:
            log.info("%s", contents)
        else:
            run_dir, problem = self._local.root.parent, f": {self._problem}" if self._problem else ""
            log.warning("%s; step %d is only in %s%s", contents, self._newest_step, run_dir, problem)

    # ---- in the thread

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._is_taken:
            with self._changed:
                self._changed.wait_for(lambda: self._done < self._requested)
                requested = self._requested
            try:
                self._upload()
            except TakenError as error:
                log.warning("checkpoint.remote: %s; this run uploads no more files", error)
                self._problem, self._is_taken = str(error), True
            except Exception as error:  # a store's library may raise any error
                self._note_failure(error)
                with self._changed:
                    self._changed.wait_for(lambda n=requested: self._requested > n, pause_s)  # type: ignore[misc]
                pause_s = min(2 * pause_s, self._longest_pause_s)
                continue
            with self._changed:
                self._done = self._done if self._is_taken else requested
                self._changed.notify_all()
            if self._problem is not None and not self._is_taken:
                log.info("%s accepts uploads again and contains step %d", self._address, self._safe_step)
                self._problem = None
            pause_s = _FIRST_PAUSE_S

    def _note_failure(self, error: Exception) -> None:
        is_explained = isinstance(error, UserError | RetryableError)
        problem = str(error) if is_explained else f"{type(error).__name__}: {reason(error)}"
        if self._problem is None:
            log.warning(
                "checkpoint.remote: %s; training continues, and the upload will be retried. The newest "
                "uploaded checkpoint is that of step %d",
                problem,
                self._safe_step,
            )
        self._problem = problem

    def put_set_aside(self) -> None:
        def put() -> None:
            with contextlib.suppress(UserError, RetryableError):  # the next launch uploads it, too
                self._check_owner()
                (self._address / SET_ASIDE).put(self._local.root.parent / SET_ASIDE)

        thread = threading.Thread(target=put, daemon=True)
        thread.start()
        thread.join(_SET_ASIDE_S)

    def _upload(self) -> None:
        try:
            newest = self.copying = next(iter(self._local.own()), None)
            if not self._has_started:
                self._start()
            self._check_owner()
            for file in map(self._local.root.parent.joinpath, _SMALL_FILES):
                if file.exists():
                    (self._address / file.name).put(file)
            if newest is None:
                return
            self._safe_step = self._upload_checkpoint(newest).step
            # The best checkpoint may have been saved during an upload, or before checkpoint.remote was set.
            if (keep_best := self._settings.keep_best) is not None:
                for best in best_of(self._local.own(), keep_best, self._evaluations)[:1]:
                    self.copying = best
                    self._upload_checkpoint(best)
        finally:
            self.copying = None

    def _start(self) -> None:
        """Take ownership of the address for this launch, and remove incomplete checkpoints there."""
        previous = _owner(self._address)
        run_id = _run_of(previous, self._address)
        if run_id not in (None, self._local.run_id):
            raise TakenError(f"{self._address} belongs to another run, {run_id}")
        self._number = self._number or 1 + (int(previous["number"]) if previous is not None else 0)
        owner = {
            "run_id": self._local.run_id,
            "number": str(self._number),
            "session": self._session,
            "process": f"{os.getpid()} on {socket.gethostname()} since {datetime.now():%F %T}",
        }
        file = self._address / OWNER
        file.write(json.dumps(owner).encode(), create=not file.exists())
        self._remove_incomplete()
        self._safe_step = max((m.step for m in list(self._uploaded.own().values())[:1]), default=0)
        self._has_started = True

    def _check_owner(self) -> None:
        owner = _owner(self._address)
        if owner is None:
            raise TakenError(f"{self._address} no longer contains {OWNER}")
        if owner["session"] != self._session:
            raise TakenError(f"{self._address} now belongs to process {owner['process']}")

    def _remove_incomplete(self) -> None:
        """Remove checkpoints whose upload was interrupted or was abandoned for a newer checkpoint."""
        for directory in self._uploaded.directories():
            if not (directory / MANIFEST).exists():
                directory.remove()

    def _upload_checkpoint(self, path: Path) -> Manifest:
        manifest = read_manifest(path)
        self._newest_step = self._newest_step or manifest.step  # saved before this launch
        folder = self._free_folder(manifest)
        if folder is None:
            return manifest
        folder.make()
        self._upload_files(path, folder, manifest.files)
        self._check_owner()
        (folder / MANIFEST).write(manifest_text(manifest).encode(), create=True)
        for old in self._uploaded.to_prune(self._settings, self._evaluations):
            if old != folder:
                (old / MANIFEST).remove()  # first, so that the rest is not a checkpoint
                self._uploaded.forget(old)
        self._remove_incomplete()
        return manifest

    def _upload_files(self, path: Path, folder: Address, names: Iterable[str]) -> None:
        sizes = {name: (path / name).stat().st_size for name in sorted(names)}
        arrived = folder.sizes()

        def upload(name: str) -> None:
            self._check_owner()  # before each file, because this process may have been suspended for hours
            (folder / name).put(path / name)

        with ThreadPoolExecutor(_NUM_THREADS, "remote") as threads:
            list(threads.map(upload, [name for name, size in sizes.items() if arrived.get(name) != size]))
        arrived = folder.sizes()
        for name, size in sizes.items():
            if arrived.get(name) != size:
                num_bytes = arrived.get(name, 0)
                raise UserError(f"{folder / name} has {num_bytes} of {size} bytes after the upload")

    def _free_folder(self, manifest: Manifest) -> Address | None:
        if manifest.summary in self._uploaded.own().values():
            return None
        number, name = self._number, f"step_{manifest.step:08d}"
        while True:
            folder = self._uploaded.root / (f"{name}-{number}" if number > 1 else name)
            if not (folder / MANIFEST).exists():
                return folder
            number += 1


def _owner(address: Address) -> dict[str, str] | None:
    file = address / OWNER
    try:
        owner = read_json(file, file.read())
    except FileNotFoundError:
        return None
    except UnreachableError:
        raise
    except UserError:
        owner = {}
    if not is_run_id(str(owner.get("run_id", ""))):  # perhaps the store was full while run.json was written
        log.warning("%s is damaged; identifying the run by the checkpoints next to it", printable(file))
        return None
    return {name: printable(value) for name, value in owner.items()}


def run_at(address: str) -> str | None:
    """Return the id of the run to which `address` belongs; None if it is free."""
    try:
        return _run_of(_owner(Address(address)), Address(address))
    except (UserError, RetryableError) as error:
        raise kind_of(error)(f"checkpoint.remote: {error}") from error


def _run_of(owner: Mapping[str, str] | None, address: Address) -> str | None:
    """Return the id of the run at `address`: from `owner`, or else from the newest checkpoint there."""
    return owner["run_id"] if owner is not None else newest_run_id(address)


def fetch_history(address: str, run_dir: Path) -> None:
    """Copy the history of the run at `address` to the new run directory that continues it."""
    for name in (METRICS, SET_ASIDE):
        with contextlib.suppress(FileNotFoundError), atomic_file(run_dir / name) as file:
            file.write((Address(address) / name).read())
