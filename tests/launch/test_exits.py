"""Who tells how a run ends."""

import pytest


def test_a_rank_of_launch_local_tells_its_end_before_the_verdict_ends_rank_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise launch=local, to which rank 0's status means that it has told, kills the rank unheard."""
    from trainer.faults.ending import ALONE_S
    from trainer.launch import exits

    slept: list[float] = []
    monkeypatch.setenv("RINGMASTER_LAUNCHER", "local")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(exits.time, "sleep", slept.append)
    exits._say_once("no memory")
    assert sum(slept) < ALONE_S and "[rank 1] no memory" in capsys.readouterr().err


def test_two_runs_that_end_alike_both_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    from trainer.launch import exits

    for _ in range(2):  # the first one's name is held while this process lives
        exits._say_once("two runs of one mistake")
    assert capsys.readouterr().err.splitlines() == ["two runs of one mistake"] * 2
