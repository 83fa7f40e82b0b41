"""Values written by other programs must have the right type, and cannot control a terminal."""

from __future__ import annotations

from pathlib import Path

from trainer.files.untrusted import printable
from trainer.run_dir.claim import RUN, run_id_of

ESCAPE = "\x1b]0;yours\x07\x1b[2J"


def test_untrusted_text_is_printed_on_one_line_and_escaped() -> None:
    assert printable(f"a\n{ESCAPE}\ud800é") == r"a\n\x1b]0;yours\x07\x1b[2J\ud800é"
    assert printable("x" * 9000) == "x" * 300 + "... (9,000 characters)"


def test_an_invalid_run_id_is_refused(tmp_path: Path) -> None:
    for text in ('{"run_id": "../x"}', '{"run_id": 1}', "[]", "{", '{"run_id": "%s"}' % ("x" * 65)):
        (tmp_path / RUN).write_text(text)
        assert run_id_of(tmp_path) is None
