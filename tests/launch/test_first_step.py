"""Modules that the processes of a run load before their first step."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT

# Only some runs need these modules, and each costs CPU time in every process at every start.
NOT_AT_THE_START = (
    *("matplotlib", "optuna", "torchvision", "transformers", "datasets", "wandb", "pandas"),
    *("torch.distributed.checkpoint", "torch.distributed.elastic", "torch._inductor.compile_fx"),
)


DDP = ("strategy=ddp", "launch=local", "launch.processes=1", "comm.timeline=false")  # it is drawn at the end


@pytest.mark.slow
def test_a_run_loads_only_modules_that_it_needs(tmp_path: Path) -> None:
    """Uses a launcher and one rank with DDP, in real interpreters that print each module that they import."""
    done = subprocess.run(
        [sys.executable, "train.py", *DDP, "train.max_steps=1", f"run_dir={tmp_path}/run"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    loaded = set(re.findall(r"import time:.*\| +(\S+)", done.stderr))
    assert {"torch", "trainer.run"} <= loaded
    unwanted = [name for name in loaded for root in NOT_AT_THE_START if f"{name}.".startswith(f"{root}.")]
    assert not unwanted, sorted(unwanted)
