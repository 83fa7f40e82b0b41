"""A signal stops a run at a step boundary, saved; a second one stops it at once."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ranks import RankFailure, run_ranks
from trainer.checkpoint.store import verify
from trainer.errors import StoppedBySignal
from trainer.signals import STOP_SIGNALS, StopRequest

ROOT = Path(__file__).parents[1]


def _raise_flags() -> list[str]:
    """Each signal sets the flag, and the handlers that were there before come back."""
    problems = []
    for number in STOP_SIGNALS:
        before = signal.getsignal(number)
        with StopRequest() as request:
            if request.is_set:
                problems.append(f"{number} is set too early")
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # the same request, passed on by torchrun
            if not request.is_set or request.signal != number:
                problems.append(f"{number} does not set it")
        if signal.getsignal(number) is not before:
            problems.append(f"{number} is still handled")
    return problems


def test_a_signal_sets_the_flag_and_its_echo_does_no_harm() -> None:
    assert run_ranks(_raise_flags, 1, init=False) == [[]]


def _ask_twice(number: int) -> None:
    with StopRequest():
        os.kill(os.getpid(), number)
        time.sleep(0.6)
        os.kill(os.getpid(), number)
        time.sleep(10)


@pytest.mark.slow
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_second_signal_ends_the_process_at_once(number: int) -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailure, match=f"died with exit code -{int(number)}"):
        run_ranks(_ask_twice, 1, number, init=False)
    assert time.monotonic() - begin < 8


# ---- whole runs under torchrun


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def _torchrun(run_dir: Path, workers: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Two ranks that train for ever; yields once ten steps are done."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *options]
    command += [
        "train.py",
        "data.dataset._target_=tests.checkpoint.noisy.Noisy",
        f"data.num_workers={workers}",
    ]
    command += ["train.epochs=1000000", "train.global_batch_size=12", "train.log_every_steps=1"]
    command += ["train.eval_every_epochs=0", "checkpoint.every_epochs=null", f"run_dir={run_dir}"]
    log = run_dir.parent / "output.txt"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 60
        while _last_step(run_dir) < 10:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(40)


def _last_step(run_dir: Path) -> int:
    log = run_dir / "train.log"
    steps = re.findall(r"step (\d+)/", log.read_text()) if log.exists() else []
    return int(steps[-1]) if steps else 0


CASES = {
    "SIGTERM to torchrun": (signal.SIGTERM, "torchrun", 2),
    "SIGINT to torchrun": (signal.SIGINT, "torchrun", 0),
    "SIGUSR1 to torchrun": (signal.SIGUSR1, "torchrun", 2),
    "SIGUSR1 to rank 1": (signal.SIGUSR1, "rank 1", 2),
    "SIGTERM to rank 0": (signal.SIGTERM, "rank 0", 0),
    "SIGTERM to all": (signal.SIGTERM, "all", 2),
    "SIGINT to all": (signal.SIGINT, "all", 0),
}


def _stop(tmp_path: Path, name: str) -> None:
    number, target, workers = CASES[name]
    run_dir = tmp_path / "run"
    with _torchrun(run_dir, workers, "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1") as torchrun:
        ranks = sorted(_children(torchrun.pid))
        processes = {"torchrun": [torchrun.pid], "rank 0": ranks[:1], "rank 1": ranks[1:2]}
        everything = [*ranks, *(worker for rank in ranks for worker in _children(rank)), torchrun.pid]
        begin = time.monotonic()
        for pid in processes.get(target, everything):
            os.kill(pid, number)
        while any(Path(f"/proc/{rank}").exists() for rank in ranks) and torchrun.poll() is None:
            time.sleep(0.05)
        assert time.monotonic() - begin < 10
        torchrun.wait(30)
    output = (tmp_path / "output.txt").read_text()
    assert torchrun.returncode != 0
    assert f"exitcode  : {StoppedBySignal.exit_code}" in output or target in ("torchrun", "all"), output
    assert "stopped by a signal after step" in output, output
    manifest = verify(run_dir / "checkpoints" / "latest")
    # Every step whose line was written is in the checkpoint, and no step is there that was not made.
    assert manifest.step == _last_step(run_dir)
    facts = json.loads((run_dir / "checkpoints" / "latest" / "state.json").read_text())
    assert facts["state"]["progress"]["samples_seen"] == 12 * manifest.step


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_signal_to_any_process_saves_and_ends_all_ranks(tmp_path: Path, name: str) -> None:
    _stop(tmp_path, name)
