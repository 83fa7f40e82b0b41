"""Copies checkpoints, in a thread on each host, to an address that survives the loss of the machine.

The address has the files of a run directory: config.yaml, metrics.jsonl, evaluations.jsonl, result.json,
run.json, and checkpoints/step_N. run.json has the id of the run, the launch that puts files there, which is
the one that started last, and what it is copying. The first rank of each host reads it and puts the files
that ranks of its host wrote, since hosts may have a disk each. Rank 0 waits until all files have arrived in
full, and puts the manifest. Without a manifest there is no checkpoint. Rank 0 alone puts what an earlier
launch saved, perhaps on more ranks.

Each file is put only while run.json is the launch's own: one that was wrongly taken for dead stops when
another has resumed its run. A file on its way may still arrive, hours later: so each launch puts
checkpoints in folders of its own, the second in step_N-2.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from pathlib import Path

from trainer.checkpoint.evaluations import FILE as EVALUATIONS
from trainer.checkpoint.evaluations import Evaluations
from trainer.checkpoint.listing import Listing, best_of, newest_run_id
from trainer.checkpoint.manifest import MANIFEST, Manifest, is_run_id, manifest_text, read_manifest, step_of
from trainer.config import CheckpointConfig
from trainer.errors import RetryableError, UserError, kind_of
from trainer.files.address import Address, UnreachableError
from trainer.files.untrusted import printable, read_json, reason
from trainer.files.writing import atomic_file

log = logging.getLogger(__name__)

OWNER = "run.json"
METRICS = "metrics.jsonl"
_SMALL_FILES = ("config.yaml", METRICS, EVALUATIONS, "result.json")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LAST_PAUSE_S = 1.0, 60.0, 5.0
_LOOK_S = 1.0  # between looks at what other ranks have put


class TakenError(UserError):
    """The address belongs to another run, or another launch continues this run there."""


class NoRemote:
    """In place of a `Remote` where there is nothing to copy."""

    in_hand: Path | None = None

    def follow(self, step: int = 0) -> None:
        """Called when the checkpoint of `step` is complete in the run directory, or other files changed."""

    def metrics(self) -> dict[str, float]:
        """How many steps the address is behind the run directory, for the log."""
        return {}

    def finish(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until everything is at the address, and log what is."""


class Copier(NoRemote):
    """Copies what ranks have written of the newest checkpoint, in a thread that training never waits for.

    Args:
        here: the run's checkpoints.
        session: tells this launch from others of the run; the same on all ranks.
        writers: the ranks whose files are copied: those of this host.
    """

    def __init__(self, address: Address, here: Listing[Path], session: str, writers: Collection[int]) -> None:
        self._address, self._here, self._session = address, here, session
        self._writers = tuple(f"-{rank:05d}-of-" for rank in writers)
        self._changed = threading.Condition()
        self._asked = self._done = 0  # how often `follow` was called, and up to which call all is there
        self._newest_step = self._safe_step = 0  # of the newest checkpoint here, and of the newest there
        self._longest_pause_s = _LONGEST_PAUSE_S
        self._copied: dict[str, tuple[int, int]] = {}  # address: its file's mtime_ns and size
        self._problem: str | None = None  # why the last attempt failed
        self._thread: threading.Thread | None = None
        self._has_saved = False  # this launch, so that the newest checkpoint here is its own
        self._has_begun = False  # run.json has named this launch
        self._is_taken = False  # by another run or launch: this one has stopped copying

    def follow(self, step: int = 0) -> None:
        with self._changed:
            self._newest_step = step or self._newest_step
            self._has_saved |= step > 0
            self._asked += 1
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="remote", daemon=True)
            self._thread.start()

    def finish(self, timeout_s: float) -> None:
        self._longest_pause_s = _LAST_PAUSE_S
        self.follow()
        with self._changed:
            self._changed.wait_for(lambda: self._is_taken or self._done == self._asked, timeout_s)

    # ---- in the thread

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._is_taken:
            with self._changed:
                self._changed.wait_for(lambda: self._done < self._asked)
                asked = self._asked
            try:
                self._copy()
            except TakenError as error:
                log.warning("checkpoint.remote: %s; nothing more of this run is put there", error)
                self._problem, self._is_taken = str(error), True
            except Exception as error:  # a store's library may raise any error
                self._note_failure(error)
                with self._changed:
                    self._changed.wait_for(lambda asked=asked: self._asked > asked, pause_s)  # type: ignore[misc]
                pause_s = min(2 * pause_s, self._longest_pause_s)
                continue
            with self._changed:
                self._done = self._done if self._is_taken else asked
                self._changed.notify_all()
            if self._problem is not None and not self._is_taken:
                log.info("%s accepts files again, and holds step %d", self._address, self._safe_step)
                self._problem = None
            pause_s = _FIRST_PAUSE_S

    def _note_failure(self, error: Exception) -> None:
        """Warn of the first failure since a success; keep later ones for `finish`."""
        told = isinstance(error, UserError | RetryableError)
        words = str(error) if told else f"{type(error).__name__}: {reason(error)}"
        if self._problem is None:
            more = "tried again, and training continues"
            log.warning("checkpoint.remote: %s; %s. It holds step %d", words, more, self._safe_step)
        self._problem = words

    def _copy(self) -> None:
        """Put what rank 0 names in run.json, at each of its attempts, until the newest here is complete."""
        done: dict[str, str] = {}
        while self._safe_step < self._newest_step:
            owner = self._owner_now()
            path, there = self._here.root / owner["of"], self._address / "checkpoints" / owner["place"]
            if owner["of"] and owner != done:
                self._put_files(path, there, filter(self._is_ours, (file.name for file in path.iterdir())))
                done = owner
            elif owner["of"] and (there / MANIFEST).exists():
                self._safe_step = step_of(owner["of"]) or 0
                self._forget_checkpoints()
            if self._safe_step < self._newest_step:
                time.sleep(_LOOK_S)

    def _is_ours(self, name: str) -> bool:
        """Whether a rank of `writers` wrote this file of a checkpoint."""
        return any(writer in name for writer in self._writers)

    def _forget_checkpoints(self) -> None:
        self._copied = {key: value for key, value in self._copied.items() if "/checkpoints/" not in key}

    def _owner_now(self) -> dict[str, str]:
        """What run.json says. TakenError if it names another launch than this one, which it did name."""
        owner = _owner(self._address)
        if owner is not None and owner["session"] == self._session:
            self._has_begun = True
            return owner
        if self._has_begun:
            by = f"no run, without {OWNER}" if owner is None else f"process {owner['process']}"
            raise TakenError(f"{self._address} belongs now to {by}")
        return {"of": "", "place": ""}

    def _put_files(self, path: Path, there: Address, names: Iterable[str]) -> None:
        """Copy files of `path`, this rank's own, to the folder `there`, and see that they arrived."""
        sizes = {name: (path / name).stat().st_size for name in sorted(names)}
        found = there.sizes() if any(str(there / name) in self._copied for name in sizes) else {}
        for name, size in sizes.items():
            self._owner_now()  # before each: this process may have been stopped for hours
            self._put_file(path / name, there / name, is_there=found.get(name) == size)
        found = there.sizes() if sizes else {}
        for name, size in sizes.items():
            if found.get(name) != size:
                raise UserError(f"{there / name} arrived with {found.get(name)} of {size} bytes")

    def _put_file(self, file: Path, there: Address, is_there: bool = True) -> None:
        """Copy `file`, unless it was copied as it is now and `is_there`: a failed attempt is continued."""
        status = file.stat()
        now = (status.st_mtime_ns, status.st_size)
        if not is_there or self._copied.get(str(there)) != now:
            there.put(file)
            self._copied[str(there)] = now


class Remote(Copier):
    """As `Copier`, on rank 0, which leads: it says what is copied, and puts the manifest.

    Attributes:
        in_hand: the checkpoint that is being copied, which must stay.
    """

    def __init__(
        self,
        address: Address,
        here: Listing[Path],
        session: str,
        writers: Collection[int],
        settings: CheckpointConfig,
        evaluations: Evaluations,
    ) -> None:
        super().__init__(address, here, session, writers)
        self._settings, self._evaluations = settings, evaluations
        self._there = Listing(address / "checkpoints", here.run_id)
        self._number = 0  # of this launch among those of the run, from 1 on; 0 before it is known
        self._attempt = 0  # to copy a checkpoint
        self._metrics_at = 0.0, 0.0  # when putting metrics.jsonl last began and ended

    def metrics(self) -> dict[str, float]:
        return {"checkpoint/remote_behind": float(max(0, self._newest_step - self._safe_step))}

    def finish(self, timeout_s: float) -> None:
        if self._safe_step < self._newest_step and not self._is_taken:
            log.info("%s: waiting up to %.0f s for step %d", self._address, timeout_s, self._newest_step)
        super().finish(timeout_s)
        words = f"{self._address} holds step {self._safe_step}"
        if self._done == self._asked:
            log.info("%s", words)
        else:
            where, problem = self._here.root.parent, f": {self._problem}" if self._problem else ""
            log.warning("%s; step %d is in %s alone%s", words, self._newest_step, where, problem)

    def _copy(self) -> None:
        try:
            alone = not self._has_saved  # asked first: a save may end at any moment
            newest = self.in_hand = next(iter(self._here.own()), None)
            if not self._has_begun:
                self._begin()
            self._owner_now()
            for file in map(self._here.root.parent.joinpath, _SMALL_FILES):
                if file.exists() and (file.name != METRICS or self._is_time_for_metrics()):
                    begin = time.monotonic()
                    self._put_file(file, self._address / file.name)
                    if file.name == METRICS:
                        self._metrics_at = begin, time.monotonic()
            if newest is None:
                return
            self._safe_step = self._put_checkpoint(newest, alone).step
            # The best may have been saved while an older one was copied, or before there was an address.
            if (keep_best := self._settings.keep_best) is not None:
                for best in best_of(self._here.own(), keep_best, self._evaluations)[:1]:
                    self.in_hand = best
                    self._put_checkpoint(best, alone=True)
        finally:
            self.in_hand = None

    def _is_time_for_metrics(self) -> bool:
        """Whether to put metrics.jsonl: it grows for months, and takes a twentieth of the time at most."""
        begin, end = self._metrics_at
        is_last = self._longest_pause_s == _LAST_PAUSE_S
        return is_last or time.monotonic() - end >= 20 * (end - begin)

    def _begin(self) -> None:
        """Become the launch that puts files at the address, and remove incomplete checkpoints there."""
        before = _owner(self._address)
        run_id = _run_of(before, self._address)
        if run_id not in (None, self._here.run_id):
            raise TakenError(f"{self._address} belongs to another run, {run_id}")
        self._number = self._number or 1 + (int(before["number"]) if before is not None else 0)
        self._say_what_is_copied("", "")
        self._remove_incomplete()
        self._safe_step = max((m.step for m in list(self._there.own().values())[:1]), default=0)
        self._has_begun = True

    def _remove_incomplete(self) -> None:
        """Remove what was cut off, or left for a newer one while the store failed."""
        for directory in self._there.directories():
            if not (directory / MANIFEST).exists():
                directory.remove()

    def _say_what_is_copied(self, of: str, place: str) -> None:
        """Write run.json: the checkpoint `of` is copied to the folder `place`; both "" while none is."""
        own = {
            "run_id": self._here.run_id,
            "number": str(self._number),
            "session": self._session,
            "process": f"{os.getpid()} on {socket.gethostname()} since {datetime.now():%F %T}",
            "of": of,
            "place": place,
            "attempt": str(self._attempt),
        }
        file = self._address / OWNER
        file.write(json.dumps(own).encode(), create=not file.exists())

    def _put_checkpoint(self, path: Path, alone: bool) -> Manifest:
        manifest = read_manifest(path)
        self._newest_step = self._newest_step or manifest.step  # saved before this launch
        there = self._free_place(manifest)
        if there is None:
            return manifest
        there.make()
        others = set[str]()
        if not alone:
            others = {name for name in manifest.files if "-of-" in name and not self._is_ours(name)}
            self._attempt += 1
            self._say_what_is_copied(path.name, there.name)
        self._put_files(path, there, manifest.files.keys() - others)
        self._wait_for_others(there, {name: manifest.files[name].bytes for name in others})
        self._owner_now()
        (there / MANIFEST).write(manifest_text(manifest).encode(), create=True)
        self._forget_checkpoints()
        for old in self._there.to_prune(self._settings, self._evaluations):
            if old != there:
                (old / MANIFEST).remove()  # first: without it, this is not a checkpoint
                self._there.forget(old)
        self._remove_incomplete()
        return manifest

    def _wait_for_others(self, there: Address, sizes: Mapping[str, int]) -> None:
        """Wait until the files of other ranks are there.

        Raises:
            RetryableError: none has arrived for `checkpoint.timeout_s`; a newer checkpoint is tried then.
        """
        missing, until = len(sizes) + 1, 0.0
        while sizes:
            found = there.sizes()
            left = [name for name, size in sizes.items() if found.get(name) != size]
            if not left:
                return
            if len(left) < missing:
                missing, until = len(left), time.monotonic() + self._settings.timeout_s
            if time.monotonic() > until:
                raise RetryableError(f"{there / left[0]} has not arrived in full from its rank")
            self._owner_now()
            time.sleep(_LOOK_S)

    def _free_place(self, manifest: Manifest) -> Address | None:
        """The place for a checkpoint, beside others of the same step; None if it is there already."""
        if manifest.summary in self._there.own().values():
            return None
        number, name = self._number, f"step_{manifest.step:08d}"
        while True:
            there = self._there.root / (f"{name}-{number}" if number > 1 else name)
            if not (there / MANIFEST).exists():
                return there
            number += 1


def _owner(address: Address) -> dict[str, str] | None:
    """What run.json at `address` says, all of it texts; None if there is none, or if it is damaged."""
    file = address / OWNER
    try:
        said = read_json(file, file.read())
    except FileNotFoundError:
        return None
    except UnreachableError:
        raise
    except UserError:
        said = {}
    if not is_run_id(str(said.get("run_id", ""))):  # a store may have been full while it was written
        log.warning("%s is damaged; going by the checkpoints there", printable(file))
        return None
    return {name: printable(value) for name, value in said.items()}


def run_at(address: str) -> str | None:
    """The id of the run to which `address` belongs; None if it is free.

    Raises:
        UserError, RetryableError: the address could not be reached.
    """
    try:
        there = Address(address)
        return _run_of(_owner(there), there)
    except (UserError, RetryableError) as error:
        raise kind_of(error)(f"checkpoint.remote: {error}") from error


def _run_of(owner: Mapping[str, str] | None, address: Address) -> str | None:
    """The id of the run at `address`: that of its `owner`, or else of the newest checkpoint there."""
    return owner["run_id"] if owner is not None else newest_run_id(address)


def fetch_history(address: str, run_dir: Path) -> None:
    """Copy the metrics of the run at `address` to a new run directory, which continues it."""
    with contextlib.suppress(FileNotFoundError), atomic_file(run_dir / METRICS) as file:
        file.write((Address(address) / METRICS).read())
