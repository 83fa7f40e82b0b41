"""Start runs of several ranks, which share a GPU if there are more ranks than GPUs."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.day import Day

GPT = (
    *("experiment=text_gpt", "data.dataset.block_size=64", "train.global_batch_size=16", "logger=jsonl"),
    *("train.eval_every_epochs=0", "checkpoint.every_epochs=null", "schedule.warmup_steps=0"),
)
_BY_HOST = 'export NCCL_HOSTID="rank$RANK" NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo; exec "$0" "$@"'


class CommandError(Exception):
    """A command failed; the message contains the end of its output."""


def train(
    day: Day, ranks: int, *overrides: str, run_dir: Path, base: Sequence[str] = GPT, **options: Any
) -> dict[str, Any]:
    """Train on `ranks`, and return the contents of result.json; `options` are arguments of `torchrun`."""
    words = [*base, "distributed.ranks_per_gpu=auto", *overrides, f"run_dir={run_dir}"]
    torchrun(day, ranks, ["train.py", *words], **options)
    result: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return result


def torchrun(
    day: Day,
    ranks: int,
    command: Sequence[str],
    by_host: bool = False,
    variables: Mapping[str, str] | None = None,
    timeout_s: float = 90,
) -> str:
    """Run a script, or `-m MODULE`, on `ranks`, and return its output.

    Raises CommandError if it fails or times out.

    Args:
        by_host: whether each rank gets its own host ID, so that any version of NCCL uses sockets.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    if by_host:
        command = ["bash", "-c", _BY_HOST, sys.executable, *command]
        launcher.append("--no-python")
    elif day.dry and command[0] != "-m":  # loading torch again takes longer than the run
        launcher += ["--run-path", "--start-method=fork"]
    return python(day, [*launcher, *command], variables, timeout_s)


def python(
    day: Day, words: Sequence[str], variables: Mapping[str, str] | None = None, timeout_s: float = 90
) -> str:
    """Run Python, and return its output. Raises CommandError, also after a timeout."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    process = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    try:
        output, _ = process.communicate(timeout=600 if day.dry else timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its ranks, which would otherwise keep the GPU
        output, _ = process.communicate()
        raise CommandError(f"no end within {timeout_s:.0f} s: {output[-2000:]}") from None
    if process.returncode:
        raise CommandError(f"status {process.returncode}: {output[-2000:]}")
    return output
