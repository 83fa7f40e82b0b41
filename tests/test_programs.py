"""The forked programs of the tests behave like those that a user starts."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests import runs
from tests.programs import end_with_parent, finish
from tests.ranks import RankFailure, run_ranks
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


def _really(*argv: str, cwd: Path, env: dict[str, str]) -> tuple[int, str, str]:
    command = [sys.executable, *argv]
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=200, start_new_session=True,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "text",
    [
        _TELLS,
        pytest.param("import os, signal\nos.kill(os.getpid(), signal.SIGINT)", marks=pytest.mark.slow),
    ],
    ids=["arguments", "SIGINT"],
)
def test_a_forked_program_is_like_a_real_one(text: str, tmp_path: Path) -> None:
    script, env = _script(tmp_path, text), {"COLOUR": "blue"}
    code, out, err = _really(script, "--one", "two", cwd=tmp_path, env=env)
    forked = finish(script, "--one", "two", cwd=tmp_path, env=env)
    assert (forked.code, forked.stdout) == (code, out)
    assert forked.stderr == err or "KeyboardInterrupt" in err


def test_what_a_forked_program_starts_may_be_forked_too(tmp_path: Path) -> None:
    """With its own arguments, environment, session, streams, signal handlers and status."""
    (tmp_path / "inner.py").write_text(
        textwrap.dedent(_TELLS.replace("sys.exit", "import signal; print(signal.getsignal(15)); sys.exit"))
    )
    script = _script(
        tmp_path,
        """
        import os, signal, subprocess, sys
        from trainer.launch import fresh
        fresh.program = lambda: [sys.executable, os.path.abspath("inner.py")]
        signal.signal(15, print)
        told = dict(environment={"COLOUR": "blue"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process = fresh.start(["--one", "two"], **told)
        print(process.communicate(), process.returncode)
        """,
    )
    forked, real = (finish(script, cwd=tmp_path, forks=forks) for forks in (True, False))
    assert (forked.code, forked.output) == (real.code, real.output)
    assert "--one" in real.stdout and real.stdout.endswith(" 7\n")


def test_settings_composed_once_are_those_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "model=vit optim=adamw ~optim.betas +optim.eps=1e-6 optim.lr=0.1 run_dir=runs/1 resume=auto"
    monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
    (composed,) = cli.compose()
    assert runs.settings(*words.split()) == config.load(composed)


@pytest.mark.slow
def test_one_that_hangs_is_shown_with_its_stack_and_is_gone_with_its_session(tmp_path: Path) -> None:
    text = "import os, time\ndef dream(): time.sleep(1000)\nos.fork()\ndream()"
    with pytest.raises(AssertionError, match=r"still runs after 1 s(.|\n)*in dream"):
        finish(_script(tmp_path, text), timeout_s=1)


def _sleep_until_ended(send: Connection) -> None:
    os.setsid()
    end_with_parent()
    send.send(os.getpid())
    time.sleep(1000)


def _be_killed_meanwhile(pid_file: Path) -> None:
    receive, send = multiprocessing.Pipe(duplex=False)
    multiprocessing.get_context("fork").Process(target=_sleep_until_ended, args=(send,)).start()
    pid_file.write_text(str(receive.recv()))
    os.kill(os.getpid(), signal.SIGKILL)


def test_none_outlives_a_pytest_that_was_killed(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="died with exit code -9"):
        run_ranks(_be_killed_meanwhile, 1, tmp_path / "pid", init=False)
    status = Path("/proc", (tmp_path / "pid").read_text(), "status")
    deadline = time.monotonic() + 100
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.05)
