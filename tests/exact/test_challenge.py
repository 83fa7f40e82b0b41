"""The challenge finds one hash however a run was disturbed, and says so if there were two."""

import random
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
        assert "fsdp" not in move.words or challenge.LEAVES % sum(move.ranks) == 0
        assert move.victim is None or move.victim < sum(move.ranks)
