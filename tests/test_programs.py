"""The forked programs of the tests behave like those that a user starts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import runs
from tests.programs import finish
from trainer import cli, config

_TELLS = """
    import os, sys
    print(sys.argv, __name__, __file__, os.getcwd(), os.environ["COLOUR"], sys.path[0], sys.stdin.read())
    print(os.getsid(0) == os.getpid() or "not a session of its own", file=sys.stderr)
    sys.exit(7)
"""


def _script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_a_forked_program_is_like_a_real_one(tmp_path: Path) -> None:
    script, env = _script(tmp_path, _TELLS), {"COLOUR": "blue"}
    real = subprocess.run(
        [sys.executable, script, "--one", "two"], cwd=tmp_path, env={**os.environ, **env},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, start_new_session=True,
    )  # fmt: skip
    forked = finish(script, "--one", "two", cwd=tmp_path, env=env)
    assert (forked.code, forked.stdout, forked.stderr) == (real.returncode, real.stdout, real.stderr)


def test_settings_composed_once_are_those_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "model=vit optim=adamw ~optim.betas +optim.eps=1e-6 optim.lr=0.1 run_dir=runs/1 resume=auto"
    monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
    (composed,) = cli.compose()
    assert runs.settings(*words.split()) == config.load(composed)
