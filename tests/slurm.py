"""A real SLURM with two nodes of one core each on this host, for the duration of a test."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import free_port

_CONF = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={port}
AuthType=auth/munge
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
ReturnToService=2
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={port0} CPUs=1 State=UNKNOWN
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=1 State=UNKNOWN
PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the variables with which srun and sbatch find it; skip the test if SLURM cannot run."""
    missing = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: apt-get install slurm-wlm munge")
    if os.geteuid():
        pytest.skip("SLURM's servants need root")
    for name in ("state", "spool.n0", "spool.n1"):
        (folder / name).mkdir(parents=True)
    numbers: set[int] = set()
    while len(numbers) < 3:
        numbers.add(free_port())
    ports = dict(zip(("port", "port0", "port1"), numbers, strict=True))
    conf = folder / "slurm.conf"
    conf.write_text(_CONF.format(folder=folder, host=socket.gethostname().split(".")[0], **ports))
    environment = {"SLURM_CONF": str(conf)}
    everything = {**os.environ, **environment}
    with contextlib.ExitStack() as stack:
        if subprocess.run(["munge", "-n"], capture_output=True, timeout=30, check=False).returncode:
            Path("/run/munge").mkdir(exist_ok=True)
            shutil.chown("/run/munge", "munge")
            stack.enter_context(_servant("runuser", "-u", "munge", "--", "munged", "--foreground", "--force"))
            deadline = time.monotonic() + 100
            while subprocess.run(["munge", "-n"], capture_output=True, timeout=30, check=False).returncode:
                assert time.monotonic() < deadline, "munged does not answer"
                time.sleep(0.1)
        stack.enter_context(_servant("slurmctld", "-D", "-c", "-f", str(conf), env=everything))
        for node in ("n0", "n1"):
            stack.enter_context(_servant("slurmd", "-D", "-N", node, "-f", str(conf), env=everything))
        deadline = time.monotonic() + 200
        idle = ["sinfo", "-h", "-t", "idle", "-o", "%D"]
        while (
            subprocess.run(idle, env=everything, capture_output=True, text=True, timeout=30).stdout.strip()
            != "2"
        ):
            assert time.monotonic() < deadline, (folder / "ctld.log").read_text()
            time.sleep(0.2)
        yield environment
        subprocess.run(["scancel", "--user=root"], env=everything, timeout=30, check=False)


@contextlib.contextmanager
def _servant(*argv: str, env: dict[str, str] | None = None) -> Iterator[None]:
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
