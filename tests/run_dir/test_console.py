"""Output during a run: the number of lines, and their encoding."""

import logging
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import started
from trainer.run_dir import console
from trainer.run_dir.console import ProgressBar


@pytest.fixture
def printed() -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    console.log.addHandler(handler)
    console.log.setLevel(logging.DEBUG)
    yield records
    console.log.removeHandler(handler)


def test_without_a_terminal_lines_are_few_and_contain_the_time_left(
    printed: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    progress = ProgressBar(total_steps=160, steps_before=60, is_main=True)
    for step in range(61, 161):
        now[0] += 0.4
        progress.advance()
        if step % 10 == 0:
            progress.step_line(f"step {step}")
        if step == 130:
            progress.line("eval")
    progress.close()
    shown = [record.getMessage() for record in printed if record.levelno == logging.INFO]
    shown_as = [
        "step 70  00:36 left",
        "step 100  00:24 left",
        "step 130  00:12 left",
        "eval  00:12 left",
        "step 160",
    ]
    assert shown == shown_as
    assert len(printed) == 11, "train.log has them all"


SLOW_TO_IMPORT = """
import sys, time
import ringmaster
import trainer.cli

def main():
    print("importing", flush=True)
    time.sleep(1000)

trainer.cli.main = main
ringmaster.main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGUSR1, 75)])
def test_an_interrupt_during_start_up_is_one_line(number: int, code: int, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_TO_IMPORT)
    with started(str(tmp_path / "slow.py")) as program:
        deadline = time.monotonic() + 100
        while "importing" not in program.stdout:
            assert program.poll() is None and time.monotonic() < deadline, program.stderr
            time.sleep(0.02)
        program.send_signal(number)
        ended = program.wait()
    assert ended.code == code
    assert ended.stderr == "interrupted before the run began: nothing was trained\n"
