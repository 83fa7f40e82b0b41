"""Files are written atomically, even with several writers."""

import os
from pathlib import Path

import pytest

from trainer.files.writing import atomic_file


def test_two_processes_with_the_same_pid_write_atomically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in two containers that share a file system."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    with atomic_file(tmp_path / "x") as one, atomic_file(tmp_path / "x") as other:
        one.write(b"first" * 1000)
        other.write(b"second")
    assert (tmp_path / "x").read_bytes() == b"first" * 1000
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
