"""launch=slurm: the run as a job, with a readable script, submitted through submitit.

submitit writes the directives and submits. The command that it would run in the job is replaced by ours: srun
then tells each task its rank, and every rank, not only rank 0, gets the signal before the time limit.
"""

import contextlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.config import Config, SlurmLaunchConfig
from trainer.config.overrides import set_to
from trainer.errors import StoppedBySignal, UserError
from trainer.files.new_directory import new_run_dir
from trainer.launch import fresh
from trainer.launch.signals import stop_signals_to

_POLL_S = 2.0
# srun ends the other tasks this long after the first has ended: a rank that hangs would keep the job.
_LAST_TASK_S = 120
_OVER = {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "PREEMPTED", "DEADLINE"}
_OVER |= {"NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"}


def launch(config: Config, argv: Sequence[str]) -> int:
    """Submit the run, print its job and logs, and wait for its end unless told not to; return its status.

    Raises:
        UserError: submitit or SLURM is missing, or SLURM refuses the job.
    """
    settings = config.launch
    assert isinstance(settings, SlurmLaunchConfig)
    named = config.run_dir or ("runs/..." if settings.dry_run else str(new_run_dir()))
    run_dir = Path(named).absolute()
    executor = _executor(settings, run_dir / "slurm")
    command = _command(
        [*(word for word in argv if not word.startswith("run_dir=")), set_to("run_dir", str(run_dir))]
    )
    if settings.dry_run:
        print(executor._make_submission_file_text(command, "dry_run"))
        return 0
    if shutil.which("sbatch") is None:
        raise UserError(
            "launch=slurm needs SLURM's sbatch, which is not here; launch.dry_run=true prints the script"
        )
    (run_dir / "slurm").mkdir(parents=True, exist_ok=True)
    (run_dir / "slurm" / "stop").unlink(missing_ok=True)
    try:
        job = executor._submit_command(command)
    except Exception as error:  # those of submitit and of subprocess
        raise UserError(f"SLURM refuses the job: {str(error).strip()}") from error
    print(f"job {job.job_id}  ->  tail -f {run_dir}/slurm/{job.job_id}_*.out", flush=True)
    return _wait(job.job_id, run_dir / "slurm" / "stop") if settings.wait else 0


def _executor(settings: SlurmLaunchConfig, folder: Path) -> Any:
    try:
        import submitit
    except ImportError as error:
        raise UserError("launch=slurm needs submitit: pip install 'ringmaster-trainer[slurm]'") from error

    class Script(submitit.SlurmExecutor):
        """A job that is a command, without a pickled function."""

        @classmethod
        def affinity(cls) -> int:
            return 2  # enough for a dry run without SLURM

    executor = Script(folder=folder)
    teardown = ["status=$?"]
    if settings.requeue:
        saved = f"$status = {StoppedBySignal.exit_code}"
        teardown += [f"if [ {saved} ] && [ ! -e {shlex.quote(str(folder / 'stop'))} ]; then"]
        teardown += ['  scontrol requeue "$SLURM_JOB_ID"', "fi"]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in fresh.told_to_ranks("slurm").items()]
    told = {
        "job_name": "ringmaster",
        "wckey": "ringmaster",
        "nodes": settings.nodes,
        "ntasks_per_node": settings.processes,
        "gpus_per_node": settings.gpus,
        "mem": settings.memory,
        "partition": settings.partition,
    }
    further = {"signal": f"USR1@{settings.save_before_s}", "requeue": settings.requeue}
    executor.update_parameters(
        **{name: value for name, value in told.items() if value is not None},
        time=settings.time,  # None is the partition's limit; without it submitit sets 5 minutes
        setup=[*settings.setup, *exports],
        teardown=[*teardown, "exit $status"],
        stderr_to_stdout=True,
        srun_args=[f"--wait={_LAST_TASK_S}"],
        additional_parameters=further | (settings.parameters or {}),
    )
    return executor


def _command(argv: Sequence[str]) -> str:
    """The command of each task; a requeued job resumes from its newest checkpoint."""
    return f"{shlex.join([*fresh.program(), *argv])} ${{SLURM_RESTART_COUNT:+resume=auto}}"


def _wait(job: str, stop: Path) -> int:
    """Wait for the end of a job, even if it is requeued; a signal has it save and stop for good."""

    def pass_on(number: int) -> None:
        stop.touch()
        how = ["--signal=USR1"]
        with contextlib.suppress(ConnectionError):
            how = [] if _state(job)[0] == "PENDING" else how
        subprocess.run(["scancel", *how, job], check=False, timeout=60)

    said = ""
    with stop_signals_to(pass_on, (signal.SIGINT, signal.SIGTERM)):
        while True:
            try:
                state, status = _state(job)
                if state in _OVER or not state:
                    break
            except ConnectionError as error:  # a restart of its controller ends no job
                if str(error) != said:
                    said = str(error)
                    print(f"SLURM does not answer: {said}; asking again", file=sys.stderr, flush=True)
            time.sleep(_POLL_S)
    if state != "COMPLETED":
        how = state or "forgotten by SLURM"
        print(f"job {job} ended as {how}, status {status}", file=sys.stderr, flush=True)
    return status if state == "COMPLETED" else status or 1


def _state(job: str) -> tuple[str, int]:
    """The job's state and exit status; ("", 1) once SLURM has forgotten the job.

    Raises:
        ConnectionError: SLURM does not answer; the message is scontrol's.
    """
    asked = ["scontrol", "--oneliner", "show", "job", job]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConnectionError("scontrol took more than 60 s") from error
    state, code = (re.search(words, told.stdout) for words in (r"\bJobState=(\w+)", r"\bExitCode=(\d+):\d+"))
    if state is not None and code is not None:
        return state[1], int(code[1])
    if "Invalid job id" in told.stderr:
        return "", 1
    raise ConnectionError((told.stderr.strip().splitlines() or [f"scontrol: status {told.returncode}"])[-1])
