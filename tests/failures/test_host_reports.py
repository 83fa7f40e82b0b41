"""Reports of hosts: their age, and the last report, which shows that a host is not lost."""

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import HashStore

from tests.failure_parts import inject
from tests.guards.test_replica_check import QUICK
from tests.ranks import RankFailure, free_port, run_ranks
from tests.runs import train
from trainer.failures import exit_report, host_reports
from trainer.failures.diagnosis import Failure, Observed, diagnose
from trainer.failures.ending import Ending
from trainer.failures.heartbeat import Heartbeat
from trainer.failures.host_reports import HostReports
from trainer.failures.neighbour import Neighbour, RankIdentity, introduction
from trainer.failures.save_on_failure import LastStep
from trainer.failures.stacks import Stacks

T = 10.0
HERE, THERE = Observed(0, 0, "here", 6), Observed(1, 1, "there", 7)
MISTAKE = Observed(1, 1, "there", 7, status=2, orderly=True, error="UserError: no such file", ended_s=0.1)


class Held:
    """The part of a store that is needed, optionally with a report of host 1."""

    def __init__(self, report: bytes | None = None) -> None:
        self.held: dict[str, bytes] = {} if report is None else {"report/1": report}

    def set(self, key: str, value: bytes) -> None:
        self.held[key] = value

    def get(self, key: str) -> bytes:
        return self.held[key]

    def add(self, key: str, amount: int) -> int:
        number = int(self.held.get(key, b"0")) + amount
        self.held[key] = str(number).encode()
        return number

    def has_extended_api(self) -> bool:
        return False

    def check(self, keys: list[str]) -> bool:
        return all(key in self.held for key in keys)


def wait_until(said: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not said():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_host_sends_a_last_report_and_waits_until_others_have_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_reports, "_HEARD_S", 100.0)
    store = Held()
    one, other = HostReports(lambda: store, 0, [THERE]), HostReports(lambda: store, 1, [HERE])  # type: ignore[arg-type, return-value]
    leaving = threading.Thread(target=other.close, args=([MISTAKE],), daemon=True)
    leaving.start()
    wait_until(lambda: "ended/1" in store.held)
    one.set_own([HERE], eager=True)
    wait_until(lambda: 1 in one.ended)
    assert leaving.is_alive()
    one._heard_at[1] -= 6000.0  # long ago, as for a lost host
    (heard,) = one.others()
    assert (heard.status, heard.error) == (2, "UserError: no such file")
    report = diagnose([HERE, heard], T, pressing=True)
    assert report is not None and (report.kind, report.status, report.ranks) == ("orderly", 2, (1,))
    one.close()
    well = HostReports(lambda: store, 1, [HERE])  # type: ignore[arg-type, return-value]
    well.close([Observed(1, 1, "there", 7, status=0)])  # immediately, because no other host needs it
    assert host_reports._opened(store.held["ended/1"])[1][0].status == 0


def raised_on_rank_0(run_dir: Path, port: int) -> None:
    """Ranks started by hand on two hosts: rank 0 serves the store; rank 1 is on its host, rank 2 is not."""
    rank = os.environ["RANK"]
    for name in [
        name for name in os.environ if re.match(r"RANK|WORLD_SIZE|MASTER_|LOCAL_|GROUP_|TORCHEL", name)
    ]:
        del os.environ[name]
    socket.gethostname = lambda: "far" if rank == "2" else "near"
    by_hand = (f"distributed.init_method=tcp://127.0.0.1:{port}", f"distributed.rank={rank}")
    raises = (*inject("raise", rank=0, step=2), "distributed.timeout_s=5")
    train(*QUICK, *raises, *by_hand, "distributed.world_size=3", f"run_dir={run_dir}")


@pytest.mark.slow
def test_the_rank_with_the_store_sends_a_last_report_before_it_exits(tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(raised_on_rank_0, 3, tmp_path, free_port(), init=False)
    assert "InjectedError" in failure.value.reports[0]
    assert [failure.value.reports[rank] for rank in (1, 2)] == ["died with exit code 1"] * 2
    file = json.loads((tmp_path / "failure.json").read_text())
    assert (file["kind"], file["rank"], file["phase"], file["step"]) == ("raised", 0, "forward", 2)


def test_an_error_of_one_rank_loses_no_step_and_torchrun_shows_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_report, "exit_now", lambda status: None)
    heartbeat, stacks = Heartbeat(), Stacks()
    heartbeat.step = heartbeat.finished = 7
    members = [RankIdentity(**introduction(rank, heartbeat, stacks), host=0) for rank in (0, 1)]
    members = [replace(each, error_file=str(tmp_path / str(each.rank))) for each in members]
    ending = Ending(heartbeat, 0, members, {each.rank: Neighbour(each) for each in members}, HashStore, T)
    ending.save.last_step = cast(LastStep, SimpleNamespace(freeze=lambda failed: 7, save=lambda: True))
    ending.writes_to(tmp_path)
    ending.end(Failure((1,), "raised", 1, "rank 1 failed", saving_host=0))
    shown = json.loads((tmp_path / "0").read_text())["message"]
    assert "rank 1 failed" in shown["message"] and int(shown["extraInfo"]["timestamp"]) > time.time() - 1
    ending.end(Failure((1,), "orderly", 1, "rank 1 RetryableError: no space", saving_host=0))
    assert "rank 1 RetryableError: no space; step 7 was saved" in (tmp_path / "failure.json").read_text()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error"))
    ending.end(Failure((2,), "orderly", 2, "rank 2 UserError: of another host"))
    assert json.loads((tmp_path / "ringmaster_end.json").read_text())["status"] == 2, "a restart ends at once"


def test_unread_reports_do_not_count_as_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts read reports only on a suspicion, at which time all reports are old."""
    then = Observed(1, 1, "there", 7)
    store = Held(host_reports._report("7/3", [then]))
    there = HostReports(lambda: store, 0, [then])  # type: ignore[arg-type, return-value]
    there.set_own([then], eager=False)
    there._heard_at[1] -= 6000.0
    there.set_own([then], eager=True)
    wait_until(lambda: there.counts[1] == 1)
    (before,) = there.others()
    assert before.heard_s < 500
    there._eager_since -= 6000.0  # an hour and a half of requests without an answer
    there._heard_at[1] -= 6000.0
    (after,) = there.others()
    assert after.heard_s > 5000
    there.resumed()  # the time of a suspension does not count either
    assert there.others()[0].heard_s < 500
    there.close()


def test_a_healthy_host_reads_a_counter_and_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reports immediately when another host requests it."""
    monkeypatch.setattr(host_reports, "_EVERY_S", 0.01)
    store, calls = Held(), list[str]()

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(store, name)
        return lambda *arguments: (calls.append(name), real(*arguments))[1]

    for name in ("set", "get", "check", "add"):
        monkeypatch.setattr(store, name, counted(name))
    one = HostReports(lambda: store, 0, [THERE])  # type: ignore[arg-type, return-value]
    one.set_own([HERE], eager=False)
    wait_until(lambda: calls.count("add") > 50)
    assert calls.count("set") <= 1 and not {"get", "check"} & set(calls)
    first = store.held.get("report/0")
    store.add("news", 1)
    wait_until(lambda: store.held.get("report/0") not in (None, first))
    one.close()
