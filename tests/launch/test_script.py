"""The batch script of launch=slurm, as launch.dry_run=true prints it."""

from __future__ import annotations

import pytest

from tests.runs import settings
from trainer.errors import UserError
from trainer.launch import slurm
from trainer.library import train

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
        train(DRY, None)
