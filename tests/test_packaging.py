"""What pyproject.toml promises: the extras that messages name, and the system."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_extras_that_are_named_exist_and_an_older_pip_finds_them() -> None:
    extras = set(PROJECT["optional-dependencies"])
    assert not [name for name in extras if "_" in name], "pip before 24 installs nothing for such a name"
    kinds = {"docs": "md", "trainer": "py", "conf": "yaml", "benchmarks": "py"}
    files = [file for folder, kind in kinds.items() for file in (ROOT / folder).rglob(f"*.{kind}")]
    files.append(ROOT / "README.md")
    named = {name for file in files for name in re.findall(r"ringmaster-trainer\[(\w+)\]", file.read_text())}
    assert named == extras - {"dev", "docs"}  # which are for a clone


def test_another_system_is_told_in_one_line() -> None:
    assert "Operating System :: POSIX :: Linux" in PROJECT["classifiers"]
    command = [
        sys.executable,
        "-c",
        "import sys; sys.platform = 'darwin'; import ringmaster; ringmaster.main()",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "Ringmaster runs on Linux only; this system is darwin\n")
    command[-1] = "import sys; sys.platform = 'darwin'; import trainer"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "ImportError: Ringmaster runs on Linux only; this system is darwin"
