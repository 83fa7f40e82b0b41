"""The challenge finds one hash however a run was disturbed, and says so if there were two."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.exact import challenge
from trainer.exact.challenge import DrawnMove, HostDriver


@pytest.mark.slow
def test_killed_and_moved_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    assert challenge.challenge(HostDriver(), minutes=0.1, seed=1, folder=tmp_path)


@pytest.mark.slow
def test_other_bits_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(challenge, "next_move", lambda *_: DrawnMove([1], "strategy=single seed=1"))
    assert not challenge.challenge(HostDriver(), minutes=0.1, seed=1, folder=tmp_path)
    assert "OTHER bits" in capsys.readouterr().out


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_moves_are_some_that_can_be_made(hosts: int) -> None:
    draw = random.Random(0)
    moves = [challenge.next_move(draw, hosts, step=100, moves_left=left) for left in (0.5, *[3.0] * 200)]
    assert moves[0].kill_at is None, "the last one goes to the end"
    for move in moves:
        assert move.kill_at is None or 100 < move.kill_at < challenge.STEPS
        assert sum(move.ranks) <= challenge.LEAVES
        assert "fsdp" not in move.overrides or challenge.LEAVES % sum(move.ranks) == 0
        assert move.victim is None or move.victim < sum(move.ranks)


@pytest.mark.parametrize("used", ["a file", "undisturbed"])
def test_a_folder_that_cannot_serve_is_refused(used: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    if used == "a file":
        folder.touch()
    else:
        (folder / used).mkdir(parents=True)
    command = [sys.executable, "-m", "trainer.exact.challenge", "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert str(folder) in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_its_ranks_too(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainer.exact.challenge", "--folder", str(tmp_path)]
    heard = "import os, signal as s, sys; s.signal(int(sys.argv[1]), s.SIG_DFL); os.execv(sys.argv[2], sys.argv[2:])"
    with subprocess.Popen(
        [sys.executable, "-c", heard, str(int(number)), *command], stderr=subprocess.PIPE, text=True
    ) as process:
        while not (tmp_path / "undisturbed" / "metrics.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.05)
        rank = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        process.send_signal(number)
        assert process.wait(timeout=20) == 128 + number
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)
