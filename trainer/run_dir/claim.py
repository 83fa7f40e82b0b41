"""Create the directory of a run, lock it while the run is alive, and mark it with the run's ID."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from trainer.checkpoint.listing import newest_run_id
from trainer.checkpoint.manifest import is_run_id, read_manifest
from trainer.checkpoint.remote import fetch_history, run_at
from trainer.errors import RetryableError, UserError, writing
from trainer.failures.processes import surroundings
from trainer.files.address import Location
from trainer.files.untrusted import load_json, printable
from trainer.files.writing import atomic_file, new_run_dir, unused_path
from trainer.run_dir import LOCK, RENEW_S, RUN
from trainer.run_dir.metrics_file import last_metrics

log = logging.getLogger(__name__)

# An NFS server keeps the locks of a dead host until its lease expires: 90 s by default.
_LEASE_S = 120.0
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


@dataclass(frozen=True)
class RunDir:
    path: Path
    run_id: str
    """A random ID, which a resumed run keeps and which identifies the run of a checkpoint."""
    used: bool
    """Whether the directory contains files of a run. They do not change until this run has resumed."""


def claim(
    wanted: str | None,
    resume: str | None,
    held: contextlib.ExitStack,
    wait_s: float,
    remote: str | None = None,
) -> RunDir:
    """Create the run directory or use an existing one, and lock it until `held` closes. Call on rank 0 only.

    Args:
        wanted: the path; None chooses a new directory under runs/.
        wait_s: the longest wait for the lock of an owner on another host, which may be dead.
        remote: the URL in `checkpoint.remote`. With resume=auto, a new run directory continues the run whose
            checkpoints are at this URL.
    """
    with writing(wanted or "null"):
        path = new_run_dir() if wanted is None else Path(wanted)
        path.mkdir(parents=True, exist_ok=True)
        held.enter_context(_locked(path, min(wait_s, _LEASE_S)))
        return _identified(path, resume, remote)


def _identified(path: Path, resume: str | None, remote: str | None) -> RunDir:
    known = run_id_of(path)
    if used := _run_files(path):
        if resume is None:
            raise UserError(
                f"run_dir={path} already contains a run ({', '.join(used)}); set resume=auto to "
                f"continue it, or run_dir={_unused_sibling(path)} to start a new run"
            )
        if resume == "auto" and known is None and not used[0].startswith("checkpoints"):
            raise UserError(
                f"run_dir={path} contains files of another run ({', '.join(used)}), but no checkpoint "
                f"to resume from; set run_dir={_unused_sibling(path)} to start a new run"
            )
        if not _is_checkpoint_of(path, known, resume):
            raise UserError(
                f"run_dir={path} contains a different run ({', '.join(used)}) than resume={resume}; set "
                f"run_dir={_unused_sibling(path)} to resume in a new directory"
            )
    remote_id = _run_at(remote, may_fail=bool(used)) if remote is not None else None
    adopts = resume == "auto" and not used and remote_id is not None
    resumes = resume is not None and (resume == "auto" or bool(used))
    run_id = (remote_id if adopts else known if resumes else None) or secrets.token_hex(8)
    if remote_id not in (None, run_id):
        raise UserError(
            f"checkpoint.remote={remote} already contains a different run, {remote_id}; set "
            "checkpoint.remote to another URL, or continue that run with resume=auto in a new run_dir"
        )
    if run_id != known:
        write_facts(path, run_id)
    if adopts and remote is not None:
        log.info("continuing run %s from checkpoint.remote=%s", run_id, remote)
        fetch_history(remote, path)
    return RunDir(path, run_id, bool(used))


def write_facts(path: Path, run_id: str, **facts: Any) -> None:
    """Write run.json: the ID of the run and, once they are known, `facts` for other programs."""
    with atomic_file(path / RUN) as file:
        file.write(json.dumps({"run_id": run_id, **facts}).encode() + b"\n")


def _run_at(remote: str, may_fail: bool) -> str | None:
    try:
        return run_at(remote)
    except (UserError, RetryableError) as error:
        if not may_fail:
            raise
        log.warning("%s; continuing with the files in run_dir", error)
        return None


def _is_checkpoint_of(path: Path, run_id: str | None, resume: str) -> bool:
    if resume == "auto" or Path(os.path.realpath(resume)).is_relative_to(os.path.realpath(path)):
        return True
    return run_id is not None and read_manifest(Path(resume)).run_id == run_id


def run_id_of(path: Location) -> str | None:
    """Return the ID in run.json, or else in the newest checkpoint; None if there is none."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, UserError):
        run_id = load_json(path / RUN).get("run_id")
        if isinstance(run_id, str) and is_run_id(run_id):
            return run_id
    return newest_run_id(path)


def _run_files(path: Path) -> list[str]:
    """Return files that show that a run used `path` and logged at least one step."""
    patterns = ("checkpoints/step_*", "result.json", "events.*[0-9]", "metrics.jsonl")
    newest = {pattern: found[-1] for pattern in patterns if (found := sorted(path.glob(pattern)))}
    if not newest.keys() & set(patterns[:2]) and not last_metrics(path):
        return []
    return [str(file.relative_to(path)) for file in newest.values()]


def _unused_sibling(path: Path) -> Path:
    named = path if path.name not in ("", "..") else path.resolve()  # `.` and `..` have no name
    return unused_path(named.parent / (named.name or "run"))


@contextlib.contextmanager
def _locked(path: Path, wait_s: float) -> Iterator[None]:
    """Hold the lock of `path`, a record lock (fcntl) on a file that names the owner.

    The kernel releases the lock when the process ends. Unlike a flock, it is not inherited by data workers,
    and NFS supports it.
    """
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    ended = threading.Event()
    try:
        _lock(descriptor, path, wait_s)
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": f"{datetime.now():%F %T}"}
        owner["surroundings"] = surroundings()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)
        threading.Thread(target=_renew, args=(path / LOCK, ended), daemon=True).start()
        yield
    finally:
        ended.set()
        os.close(descriptor)


def _renew(lock: Path, ended: threading.Event) -> None:
    """Update the modification time of the lock file regularly, to show other hosts that the run is alive."""
    while not ended.wait(RENEW_S):
        with contextlib.suppress(OSError):
            os.utime(lock)


def _lock(descriptor: int, path: Path, wait_s: float) -> None:
    start, has_warned = time.monotonic(), False
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno in _NO_LOCKS:
                log.warning(
                    "the file system of run_dir=%s does not support locks (%s), so a second run in the same "
                    "directory would not be detected",
                    path,
                    error.strerror,
                )
                return
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
        owner = _owner(descriptor)
        patience_s = wait_s if owner.get("host") != socket.gethostname() else 0.0
        # Without an owner, another process may be about to write it.
        if time.monotonic() - start >= (patience_s if owner else 3.0):
            raise UserError(
                f"another run is active in run_dir={path}: pid {owner.get('pid')} on {owner.get('host')}, "
                f"since {owner.get('since')}; wait until it ends, stop it, or use "
                f"run_dir={_unused_sibling(path)}"
            )
        if owner and not has_warned:
            log.warning(
                "run_dir=%s is locked by pid %s on %s; waiting up to %.0f s, in case that host is dead",
                path,
                owner.get("pid"),
                owner.get("host"),
                wait_s,
            )
            has_warned = True
        time.sleep(0.5)


def _owner(descriptor: int) -> dict[str, str]:
    with contextlib.suppress(ValueError):
        owner = json.loads(os.pread(descriptor, 4096, 0))
        if isinstance(owner, dict):
            return {name: printable(value) for name, value in owner.items()}
    return {}
