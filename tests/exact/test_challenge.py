"""The challenge finds one hash however a run was disturbed, and says so if there were two."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.exact import challenge
from trainer.exact.challenge import DrawnMove

COMMAND = [sys.executable, "-m", "trainer.exact.challenge", "--folder"]


@pytest.mark.slow
def test_killed_and_moved_it_ends_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(challenge, "AT_LEAST", 3)
    assert challenge.challenge(minutes=0.01, seed=1, folder=tmp_path)


def test_other_bits_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(move: DrawnMove, run_dir: Path, number: int = 0) -> None:
        run_dir.mkdir(exist_ok=True)
        (run_dir / "result.json").write_text(json.dumps({"param_sha256": move.overrides}))

    monkeypatch.setattr(challenge, "run", run)
    monkeypatch.setattr(challenge, "prepare", lambda device: None)
    for overrides, same in (("strategy=ddp", False), ("strategy=single", True)):
        monkeypatch.setattr(challenge, "next_move", lambda *_, words=overrides: DrawnMove(1, words))
        assert challenge.challenge(minutes=0.01, seed=1, folder=tmp_path) is same
        assert ("OTHER bits" in capsys.readouterr().out) is not same


def test_moves_are_some_that_can_be_made() -> None:
    draw = random.Random(0)
    moves = [challenge.next_move(draw, step=100, moves_left=left) for left in (0.5, *[3.0] * 200)]
    assert moves[0].kill_at is None, "the last one goes to the end"
    for move in moves:
        assert move.kill_at is None or 100 < move.kill_at < challenge.STEPS
        assert "fsdp" not in move.overrides or challenge.LEAVES % move.ranks == 0
        assert move.victim is None or move.victim < move.ranks <= challenge.LEAVES


@pytest.mark.slow
def test_a_folder_with_another_challenge_is_refused(tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    done = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert str(tmp_path) in done.stderr


@pytest.mark.slow
def test_a_signal_ends_its_ranks_too(tmp_path: Path) -> None:
    with subprocess.Popen([*COMMAND, str(tmp_path)], stderr=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "undisturbed" / "metrics.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.05)
        rank = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 128 + signal.SIGTERM
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)
