"""The challenge finds one hash however a run was disturbed, and says so if there were two."""

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.programs import finish, started
from trainer.exact import challenge
from trainer.exact.challenge import DrawnMove

COMMAND = ("-m", "trainer.exact.challenge", "--folder")
SHORT = """
from trainer.exact import challenge

challenge.STEPS, challenge.AT_LEAST = 60, 3
challenge.main()
"""


@pytest.mark.slow
def test_killed_and_moved_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(SHORT)
    ended = finish(f"{tmp_path}/short.py", "--minutes=0.01", "--seed=4", f"--folder={tmp_path}/runs")
    assert ended.code == 0, ended
    moves = re.findall(r"^move .*|^.* bits$", ended.stdout, re.M)
    assert len(moves) == 4 and "comm=halving_doubling on 4" in moves[1], ended
    assert {log.name for log in (tmp_path / "runs").glob("*.log")} == {f"move{each}.log" for each in range(4)}


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
    assert not moves[0].victims, "the last one goes to the end"
    for move in moves:
        assert 100 < move.kill_at < challenge.STEPS or not move.victims
        assert "fsdp" not in move.overrides or challenge.LEAVES % move.ranks == 0
        assert {*move.victims} <= {*range(move.ranks)}
        assert move.ranks <= challenge.LEAVES


@pytest.mark.slow
def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    done = finish(*COMMAND, str(tmp_path))
    assert (done.code, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "use another --folder" in done.stderr


@pytest.mark.slow
def test_a_signal_ends_its_ranks_too(tmp_path: Path) -> None:
    with started(*COMMAND, str(tmp_path), forks=True) as program:
        while not (tmp_path / "undisturbed" / "metrics.jsonl").exists():
            assert program.poll() is None
            time.sleep(0.05)
        (rank,) = (
            int(pid) for pid in Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        )
        program.send_signal(signal.SIGTERM)
        ended = program.wait(20)
    assert (ended.code, ended.stderr) == (128 + signal.SIGTERM, "")
    with pytest.raises(ProcessLookupError):
        os.kill(rank, 0)
