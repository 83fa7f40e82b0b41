"""The batch script of launch=slurm, as launch.dry_run=true prints it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.runs import settings
from trainer.api import train
from trainer.errors import UserError
from trainer.launch import slurm

DRY = ("launch=slurm", "launch.dry_run=true")


def test_a_job_has_the_time_that_was_asked_for_or_that_of_its_partition(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("submitit")
    assert slurm.launch(settings(*DRY), []) == 0
    assert "--time" not in capsys.readouterr().out, "submitit's own default is 5 minutes"
    assert slurm.launch(settings(*DRY, "launch.time=90"), []) == 0
    assert "--time=90" in capsys.readouterr().out


def test_a_program_is_told_that_a_script_is_no_result() -> None:
    with pytest.raises(UserError, match="leave no result to return"):
        train(DRY, None, ())


def test_a_controller_that_is_away_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    away = ("", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n", 1)
    running = ("JobId=7 JobState=RUNNING Reason=None ExitCode=0:0 ", "", 0)
    answers = [away, running, away, away, ("JobId=7 JobState=FAILED ExitCode=3:0 ", "", 0)]

    def played(argv: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        out, err, status = answers.pop(0)
        return subprocess.CompletedProcess(argv, status, out, err)

    monkeypatch.setattr("trainer.launch.slurm.subprocess.run", played)
    monkeypatch.setattr("trainer.launch.slurm._POLL_S", 0.0)
    assert slurm._wait("7", tmp_path / "stop") == 3
    said = capsys.readouterr().err
    assert said.count("Unable to contact slurm controller (connect failure); asking again") == 1
    assert "job 7 ended as FAILED, status 3" in said

    answers.append(("", "slurm_load_jobs error: Invalid job id specified\n", 1))
    assert slurm._wait("7", tmp_path / "stop") == 1
    assert "forgotten by SLURM" in capsys.readouterr().err
