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
