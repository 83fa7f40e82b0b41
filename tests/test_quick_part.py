"""`pytest` runs the quick part, `pytest -m ''` all, and a test that is named runs."""

from __future__ import annotations

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


def test_the_quick_part_is_what_pytest_runs(pytestconfig: pytest.Config) -> None:
    assert f"-m '{conftest.QUICK}'" in " ".join(pytestconfig.getini("addopts")) or conftest.QUICK in (
        pytestconfig.getini("addopts")
    )
