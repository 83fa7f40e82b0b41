"""Values written by others must have the right type, or are named; they cannot control a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_compare import write
from trainer.compare import main
from trainer.faults import exit_report
from trainer.faults.verdict import Verdict
from trainer.files.untrusted import printable
from trainer.run_dir.claim import RUN, run_id_of
from trainer.sweep.results import columns

ESCAPE = "\x1b]0;yours\x07\x1b[2J"


def test_text_of_others_is_one_line_that_commands_nothing() -> None:
    assert printable(f"a\n{ESCAPE}\ud800é") == r"a\n\x1b]0;yours\x07\x1b[2J\ud800é"
    assert printable("x" * 9000) == "x" * 300 + "... (9,000 characters)"


def test_a_forged_verdict_commands_no_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    forged = Verdict((0,), "died", 1, f"rank 0 {ESCAPE}\nall is well", {})
    exit_report.say(forged, 4, tmp_path)
    exit_report.keep(forged, tmp_path, {})
    for said in (capfd.readouterr().err, (tmp_path / "train.log").read_text()):
        assert r"rank 0 \x1b]0;yours\x07\x1b[2J\nall is well" in said
        assert said.replace("\n", "").isprintable()


def test_metrics_are_printed_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forged = write(tmp_path / "forged", sha=f"{ESCAPE}a", strategy=ESCAPE, comm="\r")
    assert main([write(tmp_path / "a"), forged]) == 0
    assert capsys.readouterr().out.replace("\n", "").isprintable()
    assert columns([[ESCAPE]]).isprintable()


def test_a_run_id_that_is_none_is_not_taken(tmp_path: Path) -> None:
    for text in ('{"run_id": "../x"}', '{"run_id": 1}', "[]", "{", '{"run_id": "%s"}' % ("x" * 65)):
        (tmp_path / RUN).write_text(text)
        assert run_id_of(tmp_path) is None
