"""torchrun as the first process of a container, which gets orphans and ignores signals by default."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import ROOT
from trainer.checkpoint.manifest import verify

LONG = ("train.epochs=1000000", "train.log_every_steps=1", "train.eval_every_epochs=0", "data.num_workers=1")
LONG += ("checkpoint.every_epochs=null", "distributed.device=cpu")


def _entrypoint() -> list[str]:
    """Return the command of the Dockerfile, with this interpreter's torchrun."""
    lines = re.findall(r"^ENTRYPOINT (.*)$", (ROOT / "Dockerfile").read_text(), re.M)
    (program, *options), module = json.loads(lines[-1]), [sys.executable, "-m", "torch.distributed.run"]
    assert program == "torchrun"
    return [*module, *options, "--standalone", "--nproc-per-node=1", "-m", "trainer"]


@pytest.mark.slow
def test_it_saves_at_sigterm_and_leaves_no_process(tmp_path: Path) -> None:
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("a PID namespace needs root and util-linux (unshare)")
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    command += [*_entrypoint(), *LONG, f"run_dir={tmp_path}/run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (tmp_path / "output").open("w") as output:
        outside = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=output)
        try:
            log, deadline = tmp_path / "run" / "train.log", time.monotonic() + 250
            while not (log.exists() and re.search(r"step 1\d/", log.read_text())):
                assert outside.poll() is None and time.monotonic() < deadline, (
                    tmp_path / "output"
                ).read_text()
                time.sleep(0.1)
            (first,) = _children(outside.pid)
            os.kill(first, signal.SIGTERM)
            status = outside.wait(200)
        finally:
            outside.kill()
            outside.wait()
    said = (tmp_path / "output").read_text()
    assert status == 1, said  # torchrun has a single status for failures
    assert said.count("stopped by a signal after step") == 1, said
    verify(max((tmp_path / "run" / "checkpoints").iterdir()))
    assert not any(str(tmp_path).encode() in _command(pid) for pid in Path("/proc").glob("[0-9]*"))


def _children(pid: int) -> list[int]:
    """Return the child processes of `pid` that are alive."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""
