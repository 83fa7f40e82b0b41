"""The batch script of launch=slurm, as launch.dry_run=true prints it."""

from __future__ import annotations

import pytest

from tests.runs import settings
from trainer.api import train
from trainer.errors import UserError
from trainer.launch import slurm

DRY = ("launch=slurm", "launch.dry_run=true")


def test_the_script_asks_for_what_the_settings_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert slurm.launch(settings(*DRY), ["optim.lr=0.1"]) == (0, None)
    script = capsys.readouterr().out
    assert "--time" not in script, "its partition's limit"
    assert "#SBATCH --requeue\n" in script and " optim.lr=0.1 " in script
    more = ("launch.time=90", "launch.requeue=false", "launch.parameters={account: vision, cpus-per-task: 8}")
    assert slurm.launch(settings(*DRY, *more), []) == (0, None)
    script = capsys.readouterr().out
    assert "#SBATCH --time=90\n" in script and "#SBATCH --account=vision\n" in script
    assert "requeue" not in script and "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\n" in script


def test_a_program_is_told_that_a_script_is_no_result() -> None:
    with pytest.raises(UserError, match="leave no result to return"):
        train(DRY, None, ())
