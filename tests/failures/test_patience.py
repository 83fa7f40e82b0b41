"""Long waits that are not failures: a disk, and the end of a rank for which others do not wait."""

import json
import os
import time
from pathlib import Path

import pytest

from tests.guards.test_replica_check import QUICK
from tests.ranks import run_ranks
from tests.runs import train

TIMEOUT_S, LONG_S = 3.0, 4.0


def slow_to_save_and_to_end(run_dir: Path, lines: Path) -> str:
    from trainer.loggers import RunLog

    fsync, close, slow = os.fsync, RunLog.close, [os.environ["RANK"] == "0"]

    def slow_fsync(descriptor: int) -> None:
        time.sleep(LONG_S if slow.pop() else 0)
        slow.append(False)
        fsync(descriptor)

    def slow_close(self: RunLog) -> None:
        time.sleep(LONG_S if os.environ["RANK"] == "0" else 0)
        close(self)

    os.fsync, RunLog.close = slow_fsync, slow_close  # type: ignore[method-assign]
    with lines.with_name(f"stderr{os.environ['RANK']}").open("w") as file:
        os.dup2(file.fileno(), 2)
    train(
        *QUICK,
        f"run_dir={run_dir}",
        "train.max_steps=4",
        "checkpoint.every_steps=3",
        f"distributed.timeout_s={TIMEOUT_S}",
    )
    return lines.with_name(f"stderr{os.environ['RANK']}").read_text()


@pytest.mark.slow
def test_a_slow_disk_is_reported_and_a_slow_end_is_no_failure(tmp_path: Path) -> None:
    """Two hosts, of which the second ends, and stops reporting, long before the first."""
    said, _ = run_ranks(
        slow_to_save_and_to_end, 2, tmp_path / "run", tmp_path / "x", hosts=[0, 1], init=False
    )
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 4
    assert not (tmp_path / "run" / "failure.json").exists()
    assert "has been in the checkpointing of step 3 (waiting for the disk) for" in said
