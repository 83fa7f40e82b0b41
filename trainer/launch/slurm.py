"""launch=slurm: submit the run as a job, with a readable script that starts the ranks with srun.

srun sets the rank of each task. Before the time limit, it sends a signal to every rank, not only to rank 0.
"""

import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.config import Config, SlurmLaunchConfig
from trainer.config.overrides import set_to
from trainer.errors import StoppedBySignal, UserError, WrongResultError
from trainer.files import failure_file
from trainer.files.writing import new_run_dir
from trainer.launch import new_process
from trainer.launch.signals import stop_signals_to

# srun ends the other tasks this long after the first has ended, so that a hanging rank cannot keep the job.
_LAST_TASK_S = 120
_NO_STEP = (
    "not requeued: this attempt was stopped before it had completed a step; set a higher launch.time, "
    "or a lower launch.save_before_s"
)


def launch(config: Config, argv: Sequence[str]) -> tuple[int, None]:
    """Submit the run and print its job and logs; with launch.wait, wait and return its status."""
    settings = config.launch
    assert isinstance(settings, SlurmLaunchConfig)
    named = config.run_dir or ("runs/..." if settings.dry_run else str(new_run_dir()))
    run_dir = Path(named).absolute()
    words = [*(word for word in argv if not word.startswith("run_dir=")), set_to("run_dir", str(run_dir))]
    command_line = shlex.join([*new_process.program(), *words])
    script = _script(settings, run_dir / "slurm", command_line, config.distributed.shrink)
    if settings.dry_run:
        print(script)
        return 0, None
    if shutil.which("sbatch") is None:
        raise UserError(
            "launch=slurm needs SLURM's sbatch, which was not found. Submit from a login node, or print the "
            "script with launch.dry_run=true"
        )
    (run_dir / "slurm").mkdir(parents=True, exist_ok=True)
    stop = run_dir / "slurm" / "stop"
    stop.unlink(missing_ok=True)
    (run_dir / "slurm" / "job.sh").write_text(script)
    number, jobs = run_dir / "slurm" / "id", []
    if config.resume == "auto" and number.exists() and _listed(number.read_text()):
        jobs.append(number.read_text())  # still queued or running, because its launcher was killed
    after = [f"--dependency=afterany:{job}" for job in jobs]
    wait = ["--wait"] if settings.wait else []
    command = ["sbatch", "--parsable", *after, *wait, str(run_dir / "slurm/job.sh")]
    submitted = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert submitted.stdout is not None
    job = submitted.stdout.readline().strip().partition(";")[0]
    if not job:
        raise UserError("SLURM rejected the job; see the line above for the reason")
    jobs.append(job)
    number.write_text(job)
    failed_before = failure_file.written_at(run_dir)

    def pass_on(number: int) -> None:
        """Make the job save and stop without being requeued, or cancel it if it is still queued."""
        stop.touch()
        for how in ("--state=PENDING", "--signal=USR1"):
            subprocess.run(["scancel", "--quiet", how, *jobs], check=False, timeout=60)

    if after:
        print(f"job {job} starts after the end of job {jobs[0]}, which uses the same run_dir", flush=True)
    print(f"job {job}  ->  tail -f {run_dir}/slurm/{job}_*.out", flush=True)
    with stop_signals_to(pass_on, (signal.SIGINT, signal.SIGTERM)):
        status = submitted.wait()  # sbatch itself waits for an unreachable controller
    if status == 0 and _listed(job, "--states=CANCELLED"):  # cancelled while it was queued
        status = StoppedBySignal.exit_code
    if status:
        why = f"see {run_dir}/slurm/{job}.out"
        if (
            failure_file.written_at(run_dir) != failed_before
            and (end := failure_file.read(run_dir)) is not None
        ):
            # After scancel, sbatch returns 1 although the run has saved.
            status, why = end["status"], end["message"]
        print(f"job {job} ended with status {status}: {why}", file=sys.stderr, flush=True)
    return status, None


def _listed(job: str, *options: str) -> bool:
    asked = ["squeue", "--noheader", "--format=%i", f"--jobs={job}", *options]
    return bool(subprocess.run(asked, capture_output=True, check=False, timeout=60).stdout.strip())


def _script(settings: SlurmLaunchConfig, folder: Path, command: str, shrinks: bool) -> str:
    """Return the batch script, in which a requeued job resumes from its newest checkpoint.

    Args:
        shrinks: whether the remaining tasks continue when a task dies.
    """
    asked = {
        "job-name": "ringmaster",
        "nodes": settings.nodes,
        "ntasks-per-node": settings.processes,
        "gpus-per-node": settings.gpus,
        "mem": settings.memory,
        "partition": settings.partition,
        "time": settings.time,
        "signal": f"USR1@{settings.save_before_s}",
        "output": folder / "%j.out",
        "open-mode": "append",
        "requeue": settings.requeue or None,
        **(settings.parameters or {}),
    }
    options = {name: value for name, value in asked.items() if value is not None and value is not False}
    logs = f"--unbuffered --open-mode=append --output={shlex.quote(str(folder / '%j_%t.out'))}"
    waits = "--wait=0 --kill-on-bad-exit=0" if shrinks else f"--wait={_LAST_TASK_S}"
    newest = f"ls -td {shlex.quote(str(folder.parent / 'checkpoints'))}/step_* 2>/dev/null | head -n 1"
    again = [
        f"if {{ [ $status = {StoppedBySignal.exit_code} ] || [ $status = {WrongResultError.exit_code} ]; }}"
        f" && [ ! -e {shlex.quote(str(folder / 'stop'))} ]; then",
        f'  if [ "$({newest})" = "$before" ]; then  # the next attempt would stop there as well',
        f'    echo "{_NO_STEP}"',
        "  else",
        '    scontrol requeue "$SLURM_JOB_ID"',
        "  fi",
        "fi",
    ]
    return "\n".join(
        [
            "#!/bin/bash",
            *(
                f"#SBATCH --{name}" + ("" if value is True else f"={shlex.quote(str(value))}")
                for name, value in options.items()
            ),
            *settings.setup,
            *(
                f"export {name}={shlex.quote(value)}"
                for name, value in new_process.variables_for_ranks("slurm").items()
            ),
            *(["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"] if "cpus-per-task" in options else []),
            *([f"before=$({newest})"] if settings.requeue else []),
            f"srun {waits} {logs} {command} ${{SLURM_RESTART_COUNT:+resume=auto}}",
            "status=$?",
            *(again if settings.requeue else []),
            "exit $status",
            "",
        ]
    )
