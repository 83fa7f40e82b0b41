"""The states of runs, from files that the tests write and from running, suspended and killed processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.programs import ROOT
from trainer.errors import UserError
from trainer.failures import processes
from trainer.run_dir import RENEW_S
from trainer.run_dir.claim import claim
from trainer.status import look, main, report

LONG = 4 * RENEW_S + 5


def write(folder: Path, name: str, **values: Any) -> None:
    (folder / name).write_text(json.dumps(values) + "\n")


def begin(folder: Path, pid: int = 0, host: str = "", silent_s: float = 0.0, step: int = 40) -> Path:
    """Write a run that has logged up to `step` of 100, in a process on this host or on another."""
    folder.mkdir(parents=True)
    best = {"metric": "eval/accuracy", "mode": "max"}
    write(folder, "run.json", run_id="a" * 16, first_step=0, total_steps=100, best=best)
    metrics = {"train/loss": 0.5, "usage/samples_per_second": 1234.0}
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": each, **metrics}) + "\n" for each in range(10, step + 1, 10))
    )
    rows = [{"step": 20, "branch": "b", "metrics": {"eval/loss": 0.7, "eval/accuracy": 0.9}}]
    rows += [{"step": 40, "branch": "b", "metrics": {"eval/loss": 0.6, "eval/accuracy": 0.8}}]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    here = {"host": socket.gethostname(), "surroundings": processes.surroundings()}
    write(folder, ".lock", **(here | {"host": host} if host else here), pid=pid)
    began, now = time.time() - 200 - silent_s, time.time() - silent_s
    for name in ("run.json", "metrics.jsonl", ".lock"):
        os.utime(folder / name, (now, began if name == "run.json" else now))
    return folder


@contextlib.contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_run_in_each_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with sleeping() as alive, sleeping() as suspended, sleeping() as killed:
        suspended.send_signal(signal.SIGSTOP)
        killed.kill()
        killed.wait()
        begin(tmp_path / "alive", alive.pid)
        begin(tmp_path / "suspended", suspended.pid)
        begin(tmp_path / "killed", killed.pid)
        begin(tmp_path / "of_another_host", host="gpu-07.cluster")
        begin(tmp_path / "of_a_lost_host", host="gpu-08", silent_s=LONG)
        begin(tmp_path / "pid_of_another_process", alive.pid, silent_s=LONG)
        done = begin(tmp_path / "done", killed.pid, silent_s=1)
        write(done, "result.json", steps=100, samples_per_second=99.0, **{"train/loss": 0.25})
        extended = begin(tmp_path / "extended", killed.pid)
        write(extended, "result.json", steps=30)
        extends = begin(tmp_path / "extends", alive.pid)
        write(extends, "result.json", steps=30)
        for name, status, message in (("stopped", 75, "by a signal"), ("failed", 3, "the loss is NaN " * 9)):
            ended = begin(
                tmp_path / "sweep" / f"003_{name}-{'x' * 40}", killed.pid, host="gpu-07", silent_s=1
            )
            write(ended, "failure.json", status=status, message=message, step=41, rank=3, phase="forward")
        until = time.monotonic() + 60
        while processes.state(suspended.pid) != "stopped":
            assert time.monotonic() < until
            time.sleep(0.01)
        states = {
            Path(run["run"]).name: run["state"] for run in json.loads(report([str(tmp_path)], True, 100))
        }
        assert main([str(tmp_path)]) == 0
    assert {name.partition("-")[0]: state for name, state in states.items()} == {
        "alive": "running",
        "extends": "running",
        "of_another_host": "running",
        "suspended": "suspended",
        "killed": "lost",
        "extended": "lost",
        "of_a_lost_host": "lost",
        "pid_of_another_process": "lost",
        "done": "done",
        "003_stopped": "stopped",
        "003_failed": "failed",
    }
    header, *lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[-1] == "11 runs: 1 failed, 4 lost, 1 suspended, 1 stopped, 3 running, 1 done"
    rows = {line.split()[0]: line.split() for line in lines if line}
    assert lines[0].split()[:6] == ["sweep/00..." + "x" * 19, "failed", "41/100", "the", "loss", "is"]
    # 40 of 100 steps took 200 s
    assert rows["alive"] == [
        "alive",
        "running",
        "40/100",
        "0:05:00",
        "0.5",
        "0.6",
        "0.9",
        "1234",
        socket.gethostname(),
    ]
    assert rows["of_another_host"][-1] == "gpu-07"
    assert rows["done"][1:-1] == ["done", "100/100", "0.25", "0.6", "0.9", "99"]
    assert header.split() == ["run", "state", "step", "left", "train", "eval", "best", "samples/s", "host"]


@pytest.mark.parametrize("name", ["run.json", "result.json", "failure.json", "evaluations.jsonl", ".lock"])
@pytest.mark.parametrize(
    "content", ["{", "[1]", '{"status": [], "step": "x", "steps": {}, "best": 3, "host": 1}']
)
def test_a_damaged_file_is_named_and_nothing_crashes(name: str, content: str, tmp_path: Path) -> None:
    run = begin(tmp_path / "run", host="gpu-07")
    (run / name).write_text(content)
    shown = report([str(tmp_path)], False, 100)
    assert "run  " in shown
    if content == "{":
        assert f"{run / name} is damaged: it is not valid JSON" in shown
        assert look(run)["state"] == {"failure.json": "failed", "result.json": "lost"}.get(name, "running")


def test_pruned_and_queued_trials_and_nan(tmp_path: Path) -> None:
    for name in ("000_pruned", "001_stopped", "002_requeued"):
        write(begin(tmp_path / name, silent_s=1), "failure.json", status=75, message="by a signal")
    trial = {"number": 0, "common": [], "swept": {}, "folder": "000_pruned", "state": "pruned"}
    (tmp_path / "trials.jsonl").write_text(json.dumps(trial) + "\n")
    for name, job in (("002_requeued", "7"), ("003_queued", "8"), ("004_started", "9")):
        (tmp_path / name / "slurm").mkdir(parents=True)
        (tmp_path / name / "slurm" / "id").write_text(job)
    (tmp_path / "004_started" / "slurm" / "9_0.out").touch()
    diverged = begin(tmp_path / "005_diverged", silent_s=1)
    write(diverged, "result.json", steps=100)
    with (diverged / "evaluations.jsonl").open("a") as file:
        file.write('{"step": 100, "branch": "b", "metrics": {"eval/loss": NaN}}\n')
    found = json.loads(report([str(tmp_path)], True, 100), parse_constant=pytest.fail)
    states = {Path(run["run"]).name: run["state"] for run in found}
    assert states == {
        "000_pruned": "pruned",
        "001_stopped": "stopped",
        "002_requeued": "queued",
        "003_queued": "queued",
        "005_diverged": "done",
    }
    assert "SLURM job 8 has not started: squeue --jobs=8" in report([str(tmp_path)], False, 100)
    with (tmp_path / "trials.jsonl").open("a") as file:
        file.write("{")
    assert f"{tmp_path / 'trials.jsonl'} cannot be read" in report([str(tmp_path)], False, 100)


def test_a_folder_without_access_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: object) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(os, "scandir", refuse)  # root may read anything
    assert f"Permission denied: '{tmp_path}'" in report([str(tmp_path)], False, 100)


def test_folders_without_runs(tmp_path: Path) -> None:
    assert report([str(tmp_path)], False, 100) == f"no runs in {tmp_path}: no folder there contains run.json"
    assert json.loads(report([str(tmp_path)], True, 100)) == []
    with pytest.raises(UserError, match="none is not a directory; pass the folder that contains"):
        report([str(tmp_path / "none")], False, 100)


def test_a_living_run_renews_its_lock_even_while_it_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.run_dir.claim.RENEW_S", 0.02)
    lock = tmp_path / ".lock"
    with contextlib.ExitStack() as held:
        claim(str(tmp_path), None, held, wait_s=1)
        os.utime(lock, (0, 0))
        until = time.monotonic() + 20
        while lock.stat().st_mtime == 0:
            sum(range(1000))
            assert time.monotonic() < until
        lock.rename(tmp_path / "away")  # a disk that fails
        time.sleep(0.1)
        (tmp_path / "away").rename(lock)
        os.utime(lock, (0, 0))
        while lock.stat().st_mtime == 0:
            assert time.monotonic() < until
    time.sleep(0.1)
    os.utime(lock, (0, 0))
    time.sleep(0.1)
    assert lock.stat().st_mtime == 0


@pytest.mark.slow
def test_a_real_run_from_its_start_to_its_end(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [
        "train.max_steps=100000",
        "train.epochs=100000",
        "train.log_every_steps=5",
        "distributed.device=cpu",
    ]
    words += ["train.eval_every_epochs=1", f"run_dir={run_dir}", "resume=auto"]
    command = [sys.executable, str(ROOT / "train.py"), *words]

    def seen(state: str, step: int = 0) -> dict[str, Any]:
        until = time.monotonic() + 100
        while True:
            run = look(run_dir) if (run_dir / "run.json").exists() else {"state": None, "step": 0}
            if run["state"] == state and run["step"] >= step:
                return run
            assert time.monotonic() < until, run
            time.sleep(0.1)

    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        run = seen("running", step=30)
        assert (run["total_steps"], run["host"]) == (100000, socket.gethostname())
        assert run["left_s"] > 0 and run["samples_per_second"] > 0 and run["best"] == run["eval/loss"]
        process.send_signal(signal.SIGSTOP)
        assert f"kill -CONT {process.pid}" in seen("suspended")["reason"]
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 75
        step = seen("stopped", step=30)["step"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seen("running", step=step + 5)
        process.kill()
        process.wait()
        assert "killed, or out of memory" in seen("lost")["reason"]
    finally:
        process.kill()
        process.wait()
    more = ["train.max_steps=1000000", "train.max_hours=1e-9", *words[1:]]
    assert subprocess.run([*command[:2], *more], stdout=subprocess.DEVNULL, timeout=200).returncode == 0
    assert seen("done")["damaged"] == []
