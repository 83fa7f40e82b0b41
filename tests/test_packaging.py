"""The extras that messages name, and the supported systems."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_named_extras_exist_also_for_older_pips() -> None:
    extras = set(PROJECT["optional-dependencies"])
    assert not [name for name in extras if "_" in name], "pip before 24 installs nothing for such a name"
    kinds = {"docs": "md", "trainer": "py", "conf": "yaml", "benchmarks": "py"}
    files = [file for folder, kind in kinds.items() for file in (ROOT / folder).rglob(f"*.{kind}")]
    files.append(ROOT / "README.md")
    named = {name for file in files for name in re.findall(r"ringmaster-trainer\[(\w+)\]", file.read_text())}
    assert named == extras - {"dev", "docs"}  # which are for a clone


def test_an_unsupported_system_is_a_one_line_error() -> None:
    assert "Operating System :: MacOS" in PROJECT["classifiers"]
    program = "import sys; sys.platform = 'win32'; import ringmaster; ringmaster.main()"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (2, "Ringmaster runs on Linux and macOS; this system is win32\n")


MAC = """
import builtins, io, os, signal, socket, select, sys
import numpy, torch, torchvision, hydra, torch.distributed.checkpoint, torch._dynamo
def without_proc(real):
    def opened(path, *args, **kwargs):
        if str(path).startswith(("/proc", "/dev/shm")):
            raise FileNotFoundError(path)
        return real(path, *args, **kwargs)
    return opened
builtins.open, io.open = without_proc(open), without_proc(io.open)
for name in ("open", "stat", "readlink", "scandir", "listdir"):
    setattr(os, name, without_proc(getattr(os, name)))
del os.memfd_create, os.pidfd_open, os.sched_getaffinity, signal.SIGRTMIN
del socket.MSG_NOSIGNAL, socket.SO_PEERCRED, select.epoll
torch.accelerator.current_accelerator = lambda check_available=False: torch.device("mps")
torch.accelerator.device_count = lambda: 1
sys.platform = "darwin"
"""
TRAIN = """
import os, trainer
from trainer.errors import UserError
common = ["data.num_workers=1", "train.max_steps=6", "schedule.warmup_steps=0"]
print("hash", trainer.train([*common, "run_dir=whole"])["param_sha256"])
trainer.train([*common, "run_dir=part", "checkpoint.every_steps=3"])
resumed = [*common, "run_dir=resumed", "resume=part/checkpoints/step_00000003"]
print("hash", trainer.train(resumed)["param_sha256"])
"""
OF_TWO = """
os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
try:
    trainer.train(common)
except UserError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_mac_trains_in_one_process(tmp_path: Path) -> None:
    """Simulated by removing what its kernel and its Python lack."""
    pipe = {"stdout": subprocess.PIPE, "text": True, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    runs = []
    for name, program in {"linux": TRAIN, "mac": MAC + TRAIN + OF_TWO}.items():
        (tmp_path / name).mkdir()
        runs.append(subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path / name, **pipe))  # type: ignore
    linux, mac = (run.communicate(timeout=200)[0].splitlines() for run in runs)
    hashes = [line for line in linux + mac if line.startswith("hash ")]
    assert len(hashes) == 4 and len({*hashes}) == 1
    assert mac[-1] == "on macOS, a run can have only one process, but this run has 2; start only one"
