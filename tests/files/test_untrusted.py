"""Values written by others must have the right type, or are named; they cannot control a terminal."""

from __future__ import annotations

from pathlib import Path

from trainer.files.untrusted import printable
from trainer.run_dir.claim import RUN, run_id_of

ESCAPE = "\x1b]0;yours\x07\x1b[2J"


def test_text_of_others_is_one_line_that_commands_nothing() -> None:
    assert printable(f"a\n{ESCAPE}\ud800é") == r"a\n\x1b]0;yours\x07\x1b[2J\ud800é"
    assert printable("x" * 9000) == "x" * 300 + "... (9,000 characters)"


def test_a_run_id_that_is_none_is_not_taken(tmp_path: Path) -> None:
    for text in ('{"run_id": "../x"}', '{"run_id": 1}', "[]", "{", '{"run_id": "%s"}' % ("x" * 65)):
        (tmp_path / RUN).write_text(text)
        assert run_id_of(tmp_path) is None
