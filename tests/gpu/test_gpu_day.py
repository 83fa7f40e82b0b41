"""benchmarks/gpu.sh from end to end at tiny sizes on the CPU, so that it works the first time on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import PARTS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)  # 79 s with three other workers on two cores
def test_every_part_of_the_day_on_a_gpu_runs(tmp_path: Path) -> None:
    ended = subprocess.run(
        ["benchmarks/gpu.sh", "--dry-run", "--out", str(tmp_path), "all"],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert tuple(found) == PARTS
    for name, part in found.items():
        assert part["machine"]["dry"]
        assert part["rows"] and all(row["ok"] is not False for row in part["rows"]), name
    assert "GPT-2, ours / nanoGPT" in (tmp_path / "gpu.txt").read_text()
