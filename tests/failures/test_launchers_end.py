"""Ranks save and exit soon after their launcher is killed; errors that a restart cannot fix."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.failure_parts import inject
from tests.programs import Ended, finish, started, torchrun
from trainer.checkpoint.manifest import verify
from trainer.errors import StoppedBySignal
from trainer.launch.exits import exits

FOR_EVER = (
    "data.dataset._target_=tests.checkpoint.noisy.Noisy",
    "train.epochs=1000000",
    "train.global_batch_size=12",
    "train.log_every_steps=1",
    "train.eval_every_epochs=0",
    "checkpoint.every_epochs=null",
)

LOCAL = ("train.py", "launch=local", "launch.processes=2")


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def last_step(run_dir: Path) -> int:
    log = run_dir / "train.log"
    steps = re.findall(r" step (\d+)/", log.read_text()) if log.exists() else []
    return int(steps[-1]) if steps else 0


def wait_for(condition: Callable[[], bool], output: Callable[[], str], timeout_s: float = 200) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, output()
        time.sleep(0.02)


def killed_at_step_ten(run_dir: Path, *argv: str) -> None:
    """Kill the launcher of two ranks in step 10 or later; return once they are gone."""
    with started(*argv, *FOR_EVER, f"run_dir={run_dir}", forks=True) as launcher:
        wait_for(lambda: last_step(run_dir) >= 9 or launcher.poll() is not None, lambda: launcher.stderr)
        ranks = launcher.ranks()
        assert len(ranks) == 2, launcher.stderr
        launcher.send_signal(signal.SIGKILL)
        # 5 s on an idle machine; without this mechanism, they would never exit.
        wait_for(lambda: not any(map(lives, ranks)), lambda: (run_dir / "train.log").read_text(), 100)


@pytest.mark.parametrize("launcher", [torchrun(2), pytest.param(LOCAL, marks=pytest.mark.slow)])
def test_ranks_whose_launcher_is_killed_save_and_end(launcher: tuple[str, ...], tmp_path: Path) -> None:
    killed_at_step_ten(tmp_path / "run", *launcher)
    assert verify(max((tmp_path / "run" / "checkpoints").iterdir())).step == last_step(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "failure.json").read_text())["status"] == 75


@pytest.mark.slow
def test_ranks_that_cannot_save_end_too_when_their_launcher_is_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    killed_at_step_ten(run_dir, *LOCAL, *inject("hang"))
    assert not list((run_dir / "checkpoints").glob("step_*"))
    assert "the launcher of this host died" in json.loads((run_dir / "failure.json").read_text())["message"]


# ---- errors that a restart cannot fix


def attempt(number: int, folder: Path, *argv: str) -> Ended:
    """Run the attempt with this number of a launch by torchrun, with the variables of a rank."""
    error_file = folder / f"attempt_{number}" / "0" / "error.json"
    error_file.parent.mkdir(parents=True, exist_ok=True)
    variables = {"TORCHELASTIC_ERROR_FILE": str(error_file), "TORCHELASTIC_RESTART_COUNT": str(number)}
    return finish("train.py", *argv, env=variables)


def test_an_error_that_a_restart_cannot_fix_is_raised_again_immediately(tmp_path: Path) -> None:
    """Here before the run directory is known; --cfg would only print."""
    first = attempt(0, tmp_path, "optim.lr=-1")
    assert (first.code, "optim.lr is -1" in first.stderr) == (2, True), first.output
    assert attempt(0, tmp_path, "--cfg", "job").code == 0
    again = attempt(1, tmp_path, "--cfg", "job")
    assert (again.code, again.stderr, again.stdout) == (2, first.stderr.splitlines()[-1] + "\n", "")


@pytest.mark.slow
def test_an_error_that_a_restart_may_fix_is_retried(tmp_path: Path) -> None:
    raises = inject("raise", rank=0, step=1)
    assert attempt(0, tmp_path, *FOR_EVER, *raises, f"run_dir={tmp_path}/run").code == 1
    assert attempt(1, tmp_path, "--cfg", "job").code == 0


def test_a_stop_by_torchrun_does_not_end_later_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun stops all ranks before a restart: after a failure, or when hosts join or leave."""

    def attempt(number: int, end: Exception | None = None) -> None:
        folder = tmp_path / f"attempt_{number}"
        if end is not None:  # torchrun creates the folder at each start
            shutil.rmtree(folder, ignore_errors=True)
            (folder / "0").mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "0" / "error.json"))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
        with contextlib.suppress(SystemExit) if end is not None else contextlib.nullcontext(), exits():
            if end is not None:
                raise end

    attempt(0, StoppedBySignal(None))
    attempt(1)
    attempt(0, StoppedBySignal(7))  # hosts joined
    shutil.rmtree(tmp_path / "attempt_0")  # as torchrun does before it restarts
    attempt(1)
    attempt(1, StoppedBySignal(7))
    with pytest.raises(SystemExit):
        attempt(2)
