"""A directory belongs to one run at a time, and to one run forever."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from tests.checkpoint import conftest
from tests.failures import test_ends
from tests.failures.test_launchers_end import attempt
from tests.ranks import run_ranks
from trainer.checkpoint.manifest import write_text
from trainer.checkpoint.store import Store
from trainer.errors import UserError
from trainer.run_dir import claim as run_dir_module
from trainer.run_dir.claim import LOCK, RUN, RunDir, claim

TINY = test_ends.TINY[1:]  # TensorBoard also writes into the directory
small_disk = conftest.small_disk


def claimed(path: Path | None, resume: str | None = None, wait_s: float = 1) -> RunDir:
    with ExitStack() as held:
        return claim(str(path) if path else None, resume, held, wait_s)


def save(run_dir: Path, step: int, run_id: str) -> Path:
    store = Store(run_dir / "checkpoints", run_id)
    directory = store.new_directory(step)
    return store.commit(step, "full", {"a": write_text(directory / "a", "a")}, "")


def test_files_have_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o007)
    claimed(tmp_path)
    save(tmp_path, 1, "a")
    os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()} == {0o660}


def test_two_runs_that_start_in_the_same_second_get_two_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(datetime):
        @classmethod
        def now(cls, tz: object = None) -> "Stopped":  # type: ignore[override]
            return cls(2026, 1, 2, 3, 4, 5)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainer.files.writing.datetime", Stopped)
    monkeypatch.setattr(Path, "exists", lambda path: False)  # checked before another run created it
    names = [str(claimed(None).path) for _ in range(3)]
    assert names == [f"runs/2026-01-02/03-04-05{end}" for end in ("", "-2", "-3")]


@pytest.mark.parametrize("trace", ["checkpoints/step_00000010/state.json", "metrics.jsonl"])
def test_a_used_run_directory_raises_without_resume(tmp_path: Path, trace: str) -> None:
    run_dir = tmp_path / "run"
    (run_dir / trace).parent.mkdir(parents=True)
    (run_dir / trace).write_text('{"step": 1}\n')
    (tmp_path / "run-2").mkdir()
    with pytest.raises(
        UserError, match=f"already contains a run .*resume=auto .*run_dir={run_dir}-3 to start a new"
    ):
        claimed(run_dir)
    if not trace.startswith("checkpoints"):  # their run is unknown, and there is no checkpoint
        with pytest.raises(UserError, match=f"{trace.split('/')[0]}.* no checkpoint .*run_dir={run_dir}-3 "):
            claimed(run_dir, "auto")
        (run_dir / RUN).write_text('{"run_id": "ours"}')
    assert claimed(run_dir, "auto").path == run_dir


def test_files_of_a_run_that_logged_no_step_are_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "events.out.tfevents.1795939877.host.18.0").write_text("its configuration")
    (tmp_path / "train.log").write_text("it was refused")
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "events.out.tfevents.1795939877.host.18.2.hparams").write_text("of a sweep")
    assert claimed(tmp_path).run_id != claimed(tmp_path).run_id


def test_a_run_keeps_its_id_and_a_new_run_gets_a_new_id(tmp_path: Path) -> None:
    run_dir, other = tmp_path / "run", tmp_path / "other"
    run_id = claimed(run_dir, "auto").run_id
    assert claimed(run_dir, "auto").run_id == run_id == json.loads((run_dir / RUN).read_text())["run_id"]
    checkpoint = save(run_dir, 5, run_id)
    assert claimed(run_dir, str(checkpoint)).run_id == run_id, "sent back"
    assert claimed(other, str(checkpoint)).run_id != run_id
    (run_dir / RUN).unlink()
    assert claimed(run_dir, "auto").run_id == run_id, "as its newest checkpoint says"


def test_a_used_run_directory_cannot_resume_another_run(tmp_path: Path) -> None:
    run_id = claimed(tmp_path / "run").run_id
    save(tmp_path / "run", 5, run_id)
    elsewhere, theirs = save(tmp_path / "copies", 5, run_id), save(tmp_path / "other", 5, "theirs")
    assert claimed(tmp_path / "run", str(elsewhere)).run_id == run_id
    with pytest.raises(
        UserError, match=f"contains a different run .* than resume={theirs}.*run_dir={tmp_path}/run-2"
    ):
        claimed(tmp_path / "run", str(theirs))


# ---- the lock


@contextmanager
def alive_in(run_dir: Path) -> Iterator[int]:
    """Start another process that holds the lock, and a forked worker that outlives it."""
    pipe, sign = os.pipe()
    pid = os.fork()
    if pid == 0:
        with ExitStack() as held:
            claim(str(run_dir), "auto", held, 1)
            worker = os.fork()
            if worker:
                os.write(sign, str(worker).encode())
            time.sleep(60)
        os._exit(0)
    worker = int(os.read(pipe, 20))
    try:
        yield pid
    finally:
        for process in (pid, worker):
            os.kill(process, signal.SIGKILL)
        os.waitpid(pid, 0)


def refused(attempt: Callable[[], object]) -> tuple[str, float]:
    begin = time.monotonic()
    try:
        attempt()
    except UserError as error:
        return str(error), time.monotonic() - begin
    return "accepted", time.monotonic() - begin


def a_second_run(run_dir: Path) -> dict[str, tuple[str, float]]:
    found = {}
    with alive_in(run_dir) as pid:
        found["alive"] = refused(lambda: claimed(run_dir, "auto"))
        found["pid"] = (str(pid), 0.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(socket, "gethostname", lambda: "elsewhere")
            found["elsewhere"] = refused(lambda: claimed(run_dir, "auto", wait_s=0.4))
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        found["dead"] = refused(lambda: claimed(run_dir, "auto"))  # while its worker is still alive
    return found


@pytest.mark.slow
def test_a_second_active_run_raises_and_a_dead_run_holds_no_lock(tmp_path: Path) -> None:
    (found,) = run_ranks(a_second_run, 1, tmp_path, init=False)
    pid, here = found["pid"][0], socket.gethostname()
    for case in ("alive", "elsewhere"):
        assert f"another run is active in run_dir={tmp_path}: pid {pid} on {here}" in found[case][0]
        assert f"run_dir={tmp_path}-2" in found[case][0]
    assert found["elsewhere"][1] >= 0.4, "that host may be dead, and its lock about to go"
    assert found["dead"][0] == "accepted"


def test_a_file_system_without_locks_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []

    def no_locks(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    monkeypatch.setattr(run_dir_module.log, "warning", lambda text, *args: warnings.append(text % args))
    assert claimed(tmp_path).path == tmp_path
    assert warnings == [
        f"the file system of run_dir={tmp_path} does not support locks (No locks available), "
        "so a second run in the same directory would not be detected"
    ]
    assert (tmp_path / LOCK).exists()


# ---- disks


def test_an_impossible_run_directory_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run"), tmp_path / ("x" * 300)):
        with pytest.raises(UserError, match=f"run_dir={path} cannot be written: "):
            claimed(path)


@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_one_line(small_disk: Path, tmp_path: Path) -> None:
    """As a retryable error, because somebody may free space before torchrun restarts."""
    subprocess.run(["mount", "-o", "remount,size=200k", str(small_disk)], check=True)
    launch = tmp_path / "launch"
    for_long = ("train.epochs=100000", "train.log_every_steps=1", "train.eval_every_epochs=0")
    run = (*TINY, *for_long, "checkpoint.every_epochs=null", f"run_dir={small_disk}/run")
    ended = attempt(0, launch, *run)
    assert (ended.code, "Traceback" in ended.output) == (1, False), ended
    assert (small_disk / "run" / "metrics.jsonl").read_text().count("\n") > 5, "it was under way"
    *_, message = ended.stderr.splitlines()
    assert f"run_dir={small_disk}/run cannot be written: [Errno 28] No space left" in message
    assert ended.output.count(message) == 1
