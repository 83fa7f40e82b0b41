"""The batch script of launch=slurm, as launch.dry_run=true prints it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

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
    more = (
        "launch.time=90",
        "launch.requeue=false",
        "launch.parameters={account: vision, cpus-per-task: 8, comment: a b}",
    )
    assert slurm.launch(settings(*DRY, *more), []) == (0, None)
    script = capsys.readouterr().out
    assert "#SBATCH --time=90\n" in script and "#SBATCH --account=vision\n" in script
    assert "#SBATCH --comment='a b'\n" in script
    assert "requeue" not in script and "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\n" in script


def test_a_program_is_told_that_a_script_is_no_result() -> None:
    with pytest.raises(UserError, match=r"are not supported by trainer\.train"):
        train(DRY, None, ())


@pytest.mark.parametrize(
    ("srun", "requeued"),
    [
        ("mkdir -p RUN/checkpoints/step_00000007; exit 75", True),
        ("exit 75", False),  # before a step: the next attempt would stop there, too
        ("touch RUN/checkpoints/step_00000005; exit 75", False),
        ("mkdir -p RUN/checkpoints/step_00000007 RUN/slurm; touch RUN/slurm/stop; exit 75", False),
        ("mkdir -p RUN/checkpoints/step_00000007; exit 1", False),
    ],
)
def test_only_a_stop_after_a_step_is_requeued(
    srun: str, requeued: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "my run"
    (run_dir / "checkpoints" / "step_00000005").mkdir(parents=True)
    os.utime(run_dir / "checkpoints" / "step_00000005", (1e9, 1e9))
    assert slurm.launch(settings(*DRY, f"run_dir='{run_dir}'"), []) == (0, None)
    script = tmp_path / "job.sh"
    script.write_text(capsys.readouterr().out)
    for name, body in {
        "srun": srun.replace("RUN", f"'{run_dir}'"),
        "scontrol": f"echo $@ > '{tmp_path}/arguments'",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"}
    ended = subprocess.run(
        ["bash", script], env=os.environ | path, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == int(srun.rpartition(" ")[2])
    assert (tmp_path / "arguments").exists() == requeued
    no_step = ended.returncode == 75 and not requeued and "stop" not in srun
    assert (
        "not requeued: this attempt was stopped before it had completed a step" in ended.stdout
    ) == no_step


def test_a_job_survives_its_launcher_and_can_be_cancelled_while_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, body in {
        "sbatch": f'echo "$@" > {tmp_path}/arguments; echo 13; sleep 0.5; cp {tmp_path}/failure.json {tmp_path}/run;'
        f" exit $(cat {tmp_path}/status)",
        "squeue": f'[[ "$*" = *"$(cat {tmp_path}/listed)" ]] && echo 12; true',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run_dir = tmp_path / "run"

    def launched(listed: str, status: int, *more: str) -> tuple[int, str]:
        (tmp_path / "status").write_text(str(status))
        (tmp_path / "listed").write_text(listed)
        return slurm.launch(settings("launch=slurm", f"run_dir={run_dir}", *more), [])[
            0
        ], capfd.readouterr().err

    assert launched("none", 0)[0] == 0
    assert launched("--states=CANCELLED", 0)[0] == 75
    assert "ended with status 2: see" in launched("none", 2)[1]
    (tmp_path / "failure.json").write_text(json.dumps({"status": 75, "message": "stopped after step 3"}))
    status, said = launched("none", 1)  # by scancel, after the run has saved
    assert status == 75 and "job 13 ended with status 75: stopped after step 3" in said
    assert "--dependency" not in (tmp_path / "arguments").read_text()
    assert launched("--jobs=13", 0, "resume=auto")[0] == 0
    assert "--dependency=afterany:13 --wait" in (tmp_path / "arguments").read_text()
