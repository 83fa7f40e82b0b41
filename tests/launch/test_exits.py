"""Which rank prints the message of an error."""

import pytest


def test_a_rank_of_launch_local_prints_its_error_before_the_watch_ends_rank_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise launch=local, which takes rank 0's status for a printed message, kills this rank too early."""
    from trainer.failures.ending import ALONE_S
    from trainer.launch import exits

    slept: list[float] = []
    monkeypatch.setenv("RINGMASTER_LAUNCHER", "local")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(exits.time, "sleep", slept.append)
    exits._print_once("no memory")
    assert sum(slept) < ALONE_S and "[rank 1] no memory" in capsys.readouterr().err


def test_two_runs_with_the_same_error_both_print_it(capsys: pytest.CaptureFixture[str]) -> None:
    from trainer.launch import exits

    for _ in range(2):  # the address of the first message stays bound while this process lives
        exits._print_once("two runs of one mistake")
    assert capsys.readouterr().err.splitlines() == ["two runs of one mistake"] * 2


def test_what_ends_a_run_names_its_entry_on_the_page_of_messages(capfd: pytest.CaptureFixture[str]) -> None:
    from trainer.errors import UserError
    from trainer.failures import exit_report
    from trainer.failures.diagnosis import Failure
    from trainer.launch.exits import exits

    with pytest.raises(SystemExit), exits():
        raise UserError("optim.lrr is not a setting")
    exit_report.print_failure(Failure((1,), "died", 1, "rank 1 (host 0) died of SIGKILL"), 2, None)
    exit_report.print_failure(Failure((1,), "raised", 1, "rank 1 (host 0) failed"), 2, None)
    assert capfd.readouterr().err.splitlines() == [
        "optim.lrr is not a setting",
        "  see docs/howto/troubleshooting.md#unknown-setting",
        "",
        "rank 1 (host 0) died of SIGKILL",
        "  see docs/howto/troubleshooting.md#died",
        "",
        "rank 1 (host 0) failed",
    ]
