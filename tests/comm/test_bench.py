"""The benchmark of all-reduces counts wrong elements."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import allreduce as bench
from tests.ranks import run_ranks
from trainer.comm.executor import Executor


def _bench(*argv: str) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = bench.main(argv)
    return code, out.getvalue()


def _with_zeros(*argv: str) -> tuple[int, str]:
    """Rank 1 has a faulty executor."""
    right = Executor.run

    def zeros(self: Executor, bucket: torch.Tensor, divisor: int = 1) -> Any:
        right(self, bucket, divisor)
        bucket[-3:] = 0

    if os.environ["RANK"] == "1":
        Executor.run = zeros  # type: ignore[method-assign]
    return _bench(*argv)


def test_wrong_elements_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    command = ["--sizes", "4000", "--rounds", "1", "--algorithms", "native,ring", "--json", str(file)]
    results = run_ranks(_with_zeros, 2, *command, init=False)
    assert [code for code, _ in results] == [1, 1]
    native, ring = results[0][1].splitlines()[-2:]
    assert native.endswith(" 0")
    wrong = int(ring.split()[-1])
    expected = bench.addends(1000, 0, 2)[1][-3:].count_nonzero()
    assert wrong == expected > 0
    for row in json.loads(file.read_text())["rows"]:
        assert row["algbw_gb_s"] == pytest.approx(row["size"] / row["seconds"] / 1e9)
