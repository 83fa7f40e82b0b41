"""`pytest` runs the quick part, `pytest -m ''` all, and a test that is named runs; what a test leaves is seen."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import cast

import pytest

from tests import conftest


@pytest.mark.parametrize(
    ("given", "named", "taken"),
    [
        ("not slow", ["tests/test_run.py"], "not slow"),
        ("not slow", ["tests/test_run.py", "tests/test_api.py::test_it"], ""),
        ("", ["tests"], ""),
    ],
)
def test_a_slow_test_runs_where_it_is_named(
    given: str, named: list[str], taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = SimpleNamespace(args=named, option=SimpleNamespace(markexpr=given))
    conftest.pytest_configure(cast(pytest.Config, config))
    assert config.option.markexpr == taken


def test_a_process_that_is_left_behind_is_seen_though_its_parent_is_gone() -> None:
    pids = conftest._pids()
    orphan = "sleep 1000 < /dev/null > /dev/null 2>&1 & echo $!"
    pid = int(subprocess.run(["setsid", "sh", "-c", orphan], stdout=subprocess.PIPE, check=True).stdout)
    try:
        assert conftest._processes(but=pids)[pid].split() == ["sleep", "1000"]
    finally:
        subprocess.run(["kill", "-9", str(pid)], check=True)
