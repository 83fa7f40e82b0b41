"""A signal stops a run at a step boundary with a save; a second signal stops it immediately."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs import started, started_ranks, torchrun
from tests.ranks import RankFailure, run_ranks
from trainer.checkpoint.manifest import verify
from trainer.errors import StoppedBySignal
from trainer.launch import signals
from trainer.launch.signals import STOP_SIGNALS, StopRequest


def _raise_flags() -> list[str]:
    """Each signal sets the flag, and the previous handlers are restored."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, it would be ignored
    problems = []
    signals.time.monotonic = lambda: 1000.0  # both at the same time, even on a busy machine
    for number in STOP_SIGNALS:
        before = signal.getsignal(number)
        with StopRequest() as request:
            if request.is_set:
                problems.append(f"{number} is set too early")
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # the same request, forwarded by torchrun
            if not request.is_set or request.signal != number:
                problems.append(f"{number} does not set it")
        if signal.getsignal(number) is not before:
            problems.append(f"{number} is still handled")
    return problems


def test_a_signal_sets_the_flag_and_its_echo_does_no_harm() -> None:
    assert run_ranks(_raise_flags, 1, init=False) == [[]]


def _ignore(number: signal.Signals) -> bool:
    signal.signal(number, signal.SIG_IGN)
    with StopRequest() as request, signals.stop_signals_to(lambda _: None):
        os.kill(os.getpid(), number)
        return request.is_set or signal.getsignal(number) is not signal.SIG_IGN


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_arrives_ignored_stays_ignored(number: signal.Signals) -> None:
    assert run_ranks(_ignore, 1, number, init=False) == [False]


def _ask_twice() -> None:
    with StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.6)  # within half a second, it would count as the same request
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it outlived the second signal")


def test_a_second_signal_ends_the_process_at_once() -> None:
    with pytest.raises(RankFailure, match=f"died with exit code -{int(signal.SIGINT)}"):
        run_ranks(_ask_twice, 1, init=False)


# ---- whole runs


def _for_ever(run_dir: Path, workers: int) -> list[str]:
    noisy = ["data.dataset._target_=tests.checkpoint.noisy.Noisy", f"data.num_workers={workers}"]
    noisy += ["train.epochs=1000000", "train.global_batch_size=12", "train.log_every_steps=1"]
    return [*noisy, "train.eval_every_epochs=0", "checkpoint.every_epochs=null", f"run_dir={run_dir}"]


def _wait_for_ten_steps(run_dir: Path, alive: Callable[[], bool], output: Callable[[], str]) -> None:
    deadline = time.monotonic() + 200
    while _last_step(run_dir) < 10:
        assert alive() and time.monotonic() < deadline, output()
        time.sleep(0.05)


def _last_step(run_dir: Path) -> int:
    log = run_dir / "train.log"
    steps = re.findall(r"step (\d+)/", log.read_text()) if log.exists() else []
    return int(steps[-1]) if steps else 0


def _assert_saved(run_dir: Path) -> None:
    newest = max((run_dir / "checkpoints").iterdir())
    manifest = verify(newest)
    # Every step with a written line is in the checkpoint, and no other step is.
    assert manifest.step == _last_step(run_dir)
    facts = json.loads((newest / "state.json").read_text())
    assert facts["state"]["progress"]["samples_seen"] == 12 * manifest.step
    assert "Traceback" not in (run_dir / "train.log").read_text(), "a stop is not a fault"


@pytest.mark.slow
def test_a_signal_to_one_rank_saves_and_ends_all(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with started_ranks(2, "train.py", *_for_ever(run_dir, workers=0)) as ranks:
        _wait_for_ten_steps(
            run_dir,
            lambda: all(rank.poll() is None for rank in ranks),
            lambda: "\n".join(rank.stdout + rank.stderr for rank in ranks),
        )
        os.kill(ranks[1].pid, signal.SIGUSR1)
        ended = [rank.wait() for rank in ranks]
    assert [rank.code for rank in ended] == [StoppedBySignal.exit_code] * 2, ended
    assert sum(rank.output.count("stopped by a signal after step") for rank in ended) == 1, ended
    _assert_saved(run_dir)


@pytest.mark.slow
def test_a_signal_to_torchrun_saves_and_ends_all_ranks(tmp_path: Path) -> None:
    command = torchrun(2, "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1")
    with started(*command, *_for_ever(run_dir := tmp_path / "run", workers=2)) as launcher:
        _wait_for_ten_steps(run_dir, lambda: launcher.poll() is None, lambda: launcher.stderr)
        launcher.send_signal(signal.SIGTERM)
        ended = launcher.wait()
    assert ended.code != 0
    assert ended.output.count("stopped by a signal after step") == 1, ended.output
    _assert_saved(run_dir)
