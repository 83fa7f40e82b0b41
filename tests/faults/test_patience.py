"""What takes long and is no fault: a disk, and the end of a rank that others do not wait for."""

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.ranks import run_ranks
from tests.runs import train
from tests.test_replicas import QUICK
from trainer.faults.reports import Reports
from trainer.faults.verdict import Observed

TIMEOUT_S, LONG_S = 5.0, 8.0


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
def test_a_slow_disk_and_a_slow_end_are_named_and_waited_for(tmp_path: Path) -> None:
    """On two hosts: the second one has ended, and is heard of no more, long before the first."""
    said, _ = run_ranks(
        slow_to_save_and_to_end, 2, tmp_path / "run", tmp_path / "x", hosts=[0, 1], init=False
    )
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 4
    assert not (tmp_path / "run" / "failure.json").exists()
    assert "has been in the checkpoint (waiting for the disk) of step 3 for" in said
    assert "has been in the end of step 4 for" in said


def slow_under_fsdp(run_dir: Path) -> str:
    """What rank 0 prints of rank 1, which goes on once it has been named."""
    from trainer.faults import rehearsal

    lines = [run_dir.with_name(f"stderr{rank}") for rank in range(2)]
    with lines[int(os.environ["RANK"])].open("w") as file:
        os.dup2(file.fileno(), 2)

    def until_named(seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while "has been in" not in lines[0].read_text() and time.monotonic() < deadline:
            time.sleep(0.05)

    rehearsal.time = SimpleNamespace(sleep=until_named, time=time.time)  # type: ignore[assignment]
    # Its stack would be asked for at 32 s anyway.
    fault = ("fault=slow", "fault.rank=1", "fault.step=2", "fault.seconds=28")
    train(*QUICK, *fault, "strategy=fsdp", "distributed.timeout_s=40", f"run_dir={run_dir}")
    return lines[0].read_text()


@pytest.mark.slow
def test_of_ranks_in_one_gather_the_one_that_is_not_there_yet_is_slow(tmp_path: Path) -> None:
    said, _ = run_ranks(slow_under_fsdp, 2, tmp_path / "run", init=False)
    assert re.search(r"rank 1 .* has been in forward of step 2 for .* s, at .*until_named; the others", said)


class Told:
    """A store in which host 1 has reported when it was still being set up, and is asked now and then."""

    def __init__(self, report: str) -> None:
        self.held = {"report/1": report.encode()}

    def set(self, key: str, value: str) -> None:
        self.held[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.held[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.held for key in keys)


def test_what_was_not_asked_for_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts read each other's reports every few seconds: at the first suspicion all of them are old."""
    then = Observed(1, 1, "there", 7)
    store = Told(json.dumps({"id": "7/3", "ranks": [asdict(then)]}))
    reports = Reports(lambda: store, 0, [then])  # type: ignore[arg-type, return-value]
    reports.tell([], eager=False)
    deadline = time.monotonic() + 100
    while reports.counts[1] != 1:
        assert time.monotonic() < deadline, "it has not read the report"
        time.sleep(0.01)
    monkeypatch.setattr("trainer.faults.reports._EVERY_S", 900.0)
    reports._heard_at[1] -= 6000.0
    reports.tell([], eager=True)
    (before,) = reports.others()
    assert before.heard_s < 500
    reports._eager_since -= 6000.0  # an hour and a half of asking without an answer
    (after,) = reports.others()
    assert after.heard_s > 5000
    reports.close()


def test_who_leads_a_host_no_more_is_silent_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last report would contradict those of who leads now, for ever; and each of them counts for itself."""
    monkeypatch.setattr("trainer.faults.reports._EVERY_S", 0.01)
    store = Told(json.dumps({"id": "7/900", "ranks": [asdict(Observed(1, 1, "there", 7))]}))
    reports = Reports(lambda: store, 0, [Observed(1, 1, "there", 7)])  # type: ignore[arg-type, return-value]

    def wait_until(said: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 100
        while not said():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    reports.tell([Observed(0, 0, "here", 6)], eager=True)
    wait_until(lambda: "report/0" in store.held and reports.counts[1] == 1)
    reports.rest()
    store.held["report/1"] = json.dumps({"id": "8/1", "ranks": [asdict(Observed(1, 1, "there", 7))]}).encode()
    reports.tell([], eager=True)
    wait_until(lambda: reports.counts[1] == 2)  # nor does it write in this round ...
    del store.held["report/0"]
    store.held["report/1"] = json.dumps({"id": "8/2", "ranks": [asdict(Observed(1, 1, "there", 7))]}).encode()
    wait_until(lambda: reports.counts[1] == 3)  # ... or the next
    assert "report/0" not in store.held
    reports.close()
