"""Diagnosis of the rank that failed first, from synthetic observations without processes or a clock."""

from dataclasses import replace

import pytest

from trainer.failures.diagnosis import Observed, diagnose, slow, stand_still
from trainer.failures.host_reports import HostReports

T = 10.0


def rank(number: int, **facts: object) -> Observed:
    """Return one of four ranks on two hosts, in the forward pass of step 7, changed by `facts`."""
    usual = {"phase": "forward", "step": 7, "position": 40, "silent_s": 0.1, "asleep_s": 0.1}
    return Observed(number, number // 2, f"node{number // 2}", 100 + number, **{**usual, **facts})  # type: ignore[arg-type]


def four(changed: dict[int, dict[str, object]], **others: object) -> list[Observed]:
    return [rank(number, **changed.get(number, others)) for number in range(4)]


WAITING = {"phase": "backward", "position": 41, "bucket": 0, "buckets": 9}
SET_UP = {"phase": "set_up", "step": 0, "position": 0, "silent_s": 10.2}
SYMPTOM = {**WAITING, "status": 1, "symptom": True, "error": "RuntimeError: gloo", "ended_s": 2.3}


def silent(facts: dict[str, object], seconds: float) -> dict[str, object]:
    return {**facts, "silent_s": seconds}


METRIC = {**WAITING, "phase": "evaluate", "waits": True, "silent_s": 10.1}
CASES = {
    "killed, the others cut off by it": (
        four({1: {"state": "dead", "ended_s": 2.4, "death": "died of SIGKILL"}}, **SYMPTOM),
        True,
        (1, "died", "rank 1 (host 0, node0, pid 101) died of SIGKILL, in the forward pass of step 7"),
    ),
    "killed, and its parent asked first": (
        four({1: {"state": "dead", "ended_s": 0.1}}, **WAITING),
        False,
        (1, "died", "died without a message"),
    ),
    "raised": (
        four({2: {"status": 1, "error": "ValueError: boom", "where": "mine.py:3 in f", "ended_s": 0.2}}),
        False,
        (2, "raised", "failed in the forward pass of step 7, at mine.py:3 in f: ValueError: boom"),
    ),
    "stopped, behind": (
        four({3: {"state": "stopped", "silent_s": 10.1, "asleep_s": 10.1}}, **silent(WAITING, 10.0)),
        False,
        (3, "stopped", "has been stopped (by SIGSTOP or a debugger) for 10.1 s, in the forward pass of step 7"),
    ),
    "an endless loop": (
        four({0: {"silent_s": 10.1, "where": "mine.py:9 in f"}}, **silent(WAITING, 10.0)),
        False,
        (0, "hangs", "hangs in the forward pass of step 7, without progress for 10.1 s, at mine.py:9 in f"),
    ),
    "an endless loop in C": (
        four({2: {**silent(WAITING, 10.2), "asleep_s": 10.2}}, **silent(WAITING, 10.1)),
        False,
        (2, "hangs", "holds the interpreter lock (GIL)"),
    ),
    "an endless loop in a data worker": (
        four(
            {1: {"phase": "data", "position": 39, "silent_s": 10.2, "worker": "its data worker 9 reads 77"}},
            **silent(WAITING, 10.1),
        ),
        False,
        (1, "hangs", "hangs in the data loading of step 7, without progress for 10.2 s; its data worker 9 reads 77"),
    ),
    "all in one phase, and one does not wait": (
        four({2: silent(WAITING, 10.2)}, **silent({**WAITING, "waits": True}, 10.1)),
        False,
        (2, "hangs", "hangs in the backward pass"),
    ),
    "one that waits in vain is not the one": (
        four({2: silent(WAITING, 10.2)}, **SYMPTOM),
        True,
        (2, "hangs", "hangs in the backward pass"),
    ),
    "in the set-up, for which the others have waited": (
        four({1: {**SET_UP, "where": "mine.py:3 in f"}}, **SET_UP, waits=True, waited_s=8.5),
        False,
        (1, "hangs", "hangs in the set-up before the first step, without progress for 10.2 s, at mine.py:3 in f"),
    ),
    "a cut link": (
        four({2: {"heard_s": 10.3}, 3: {"heard_s": 10.3}}, **silent(WAITING, 10.1)),
        False,
        (2, "lost", "host 1 (node1) with rank 2, rank 3: down or disconnected, no report for 10.3 s"),
    ),
    "a disk that takes longer than that": (
        four({2: {"phase": "checkpoint", "patience_s": 60.0, "silent_s": 60.1}}, phase="checkpoint", silent_s=60.1),
        False,
        (2, "hangs", "hangs in the checkpointing of step 7 (waiting for the disk), without progress for 60.1 s"),
    ),
    "stopped while it waits for the disk": (
        four(
            {0: silent({"phase": "checkpoint", "patience_s": 60.0, "asleep_s": 10.1, "state": "stopped"}, 10.1)},
            phase="checkpoint", silent_s=10.1,
        ),
        False,
        (0, "stopped", "for 10.1 s, in the checkpointing of step 7 (waiting for the disk)"),
    ),
    "a network that breaks while all are well": (
        four({}, **SYMPTOM),
        True,
        (0, "unknown", "no process is dead, stopped or behind"),
    ),
    "a collective in a metric that rank 2 computes alone": (
        four({2: {**METRIC, "where": "mine.py:9 in compute"}}, **METRIC, where="torch"),
        False,
        (0, "unknown", "different collectives: rank 2 at mine.py:9 in compute, rank 0 and 2 more at torch"),
    ),
}  # fmt: skip


def test_a_rank_that_waited_gets_time_to_wake_up() -> None:
    """Rank 0 returns from a slow disk first, and is ahead by many micro-batches."""
    kept = silent({"phase": "checkpoint", "position": 50}, 3 * T)
    gone_on = {"phase": "backward", "step": 8, "position": 74, "buckets": 9}
    assert diagnose([rank(0, **gone_on), rank(1, **kept)], T, pressing=False) is None
    assert diagnose([rank(0, **silent(gone_on, T - 0.1)), rank(1, **kept)], T, pressing=False) is None
    report = diagnose([rank(0, **silent(gone_on, T)), rank(1, **kept)], T, pressing=False)
    assert report is not None and report.ranks == (1,)


@pytest.mark.parametrize("case", CASES)
def test_the_rank_that_failed_first_is_reported(case: str) -> None:
    ranks, pressing, (culprit, kind, words) = CASES[case]
    for order in (ranks, ranks[::-1]):
        report = diagnose(order, T, pressing)
        assert report is not None
        assert (report.ranks[0], report.kind) == (culprit, kind), report
        assert words in report.message
        assert {"rank", "host", "phase", "where", "step", "silent_s"} == report.facts.keys()


NO_REASON = {
    "all are well": four({}),
    "slow, but not for long enough": four({1: silent({}, 9.0)}, **silent(WAITING, 8.9)),
    "torch compiles in the first step": four({}, step=1, silent_s=100.0),
    "a rank still writes the checkpoint": four(
        {0: {"phase": "checkpoint", "silent_s": 0.2}}, phase="checkpoint", silent_s=100.0
    ),
    "the disk holds the one who writes": four(
        {2: {"phase": "checkpoint", "patience_s": 60.0, "silent_s": 59.0}}, phase="checkpoint", silent_s=59.0
    ),
    "one is still at its end, and the others have ended": four(
        {0: {"phase": "end", "silent_s": 100.0}}, status=0, position=39, heard_s=0.0, silent_s=100.0
    ),
    "one is a little later in the set-up": four({1: SET_UP}, **SET_UP, waits=True, waited_s=5.0),
    "set-up takes long": four({}, phase="set_up", step=0, position=0, silent_s=100.0),
    "communication has only just failed": four({1: silent(WAITING, 1.0)}, **{**SYMPTOM, "ended_s": 0.5}),
    "others have ended well": four({1: {"silent_s": 0.1}}, status=0, silent_s=50.0),
}


@pytest.mark.parametrize("case", NO_REASON)
def test_without_a_reason_there_is_no_failure(case: str) -> None:
    assert diagnose(NO_REASON[case], T, pressing=False) is None


def test_a_slow_rank_is_reported_while_it_is_slow() -> None:
    late = four({1: silent({}, 3.0)}, **silent(WAITING, 2.9))
    assert stand_still(late, 1.0)
    assert not stand_still(late, 2.95), "the others wait for less"
    assert slow(late) == late[1]
    level = [replace(each, position=40, buckets=0) for each in late]
    assert slow(level) is None, "no rank is behind"
    level = [replace(each, where="torch.py:7 in wait", waits=True) for each in level]
    assert slow(level) is None, "all wait"
    level[3] = replace(level[3], where="mine.py:7 in f", waits=False)
    assert slow(level) == level[3], "it alone does not wait"
    level[2] = replace(level[2], patience_s=60.0)
    assert slow(level) == level[2], "the disk holds it"


def test_an_orderly_end_keeps_its_status() -> None:
    report = diagnose(
        four({3: {"status": 2, "orderly": True, "error": "no such file", "ended_s": 6.0}}), T, False
    )
    assert report is not None
    assert (report.kind, report.status, report.ranks) == ("orderly", 2, (3,))


def test_a_hang_on_another_host_is_reported_after_a_new_report_of_it() -> None:
    """A report from the set-up may be read long after all ranks have finished it."""
    waiting = four({3: silent({"position": 1, "step": 0, "phase": "set_up"}, 10.1)}, **silent(WAITING, T))
    hangs = diagnose(waiting, T, pressing=False)
    assert hangs is not None and hangs.kind == "hangs" and hangs.ranks == (3,)
    there = HostReports(lambda: 1 / 0, 0, [rank(3)])  # type: ignore[arg-type, return-value]
    for count, is_confirmed in ((7, False), (8, False), (9, True)):
        there.counts[1] = count
        assert there.confirmed(hangs.ranks, 1) is is_confirmed
    there.suspicion = None  # all ranks have continued in the meantime
    assert not there.confirmed(hangs.ranks, 1)
    assert there.confirmed(hangs.ranks, 0), "a rank of this host is seen as it is"
