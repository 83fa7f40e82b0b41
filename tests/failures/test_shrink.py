"""distributed.shrink: when ranks die or hang, the survivors continue in their processes, with equal bits."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.failure_parts import inject
from tests.failures.test_ends import TINY
from tests.programs import Ended, Program, finish, finish_ranks, started
from tests.runs import settings
from trainer import run
from trainer.config.saved_run import saved_settings
from trainer.distributed import shrink
from trainer.errors import UserError
from trainer.failures import processes
from trainer.failures.diagnosis import Failure, Observed
from trainer.failures.ending import Ending
from trainer.failures.heartbeat import Heartbeat
from trainer.failures.neighbour import RankIdentity
from trainer.failures.save_on_failure import find_survivors
from trainer.launch.rank_info import RankInfo

RUN = ("strategy=ddp", "distributed.shrink=true", "distributed.timeout_s=5", "checkpoint.every_epochs=null")
EXACT = (*TINY, "train.exact=6", "train.epochs=3")


def rank(number: int, **more: object) -> Observed:
    facts = {"step": 8, "finished": 7, "phase": "forward", "host": number // 2, **more}
    return Observed(rank=number, hostname="h", pid=number, **facts)  # type: ignore[arg-type]


def died(*ranks: int, kind: str = "died") -> Failure:
    return Failure(ranks, kind, 1, "")


def test_all_usable_ranks_survive() -> None:
    four = [rank(0), rank(1), rank(2), rank(3, state="dead")]
    assert find_survivors(four, died(3), by_host=False) == (0, 1, 2)
    four[1] = rank(1, state="dead")  # at the same time
    assert find_survivors(four, died(3), by_host=False) == (0, 2)
    four[0] = rank(0, status=1, symptom=True)  # a communication error that another rank has caused
    assert find_survivors(four, died(3), by_host=False) == (0, 2)
    four[0] = rank(0, status=1)
    assert find_survivors(four, died(3), by_host=False) == (2,)


def test_a_rank_that_dies_during_the_save_is_no_survivor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [rank(0), rank(1), rank(2), rank(3, state="dead")]
    here: Any = {
        each: SimpleNamespace(look_for_death=lambda: None, observe=lambda each=each: seen[each])
        for each in range(4)
    }
    ending = Ending(
        Heartbeat(), 0, [RankIdentity(each, 0, "h", each, 0, 0, 0) for each in here], here, None, 5
    )
    ending.let_shrink(lambda: None, lambda num_ranks: None)
    ending.save.is_saved = True
    continued: list[Failure] = []
    monkeypatch.setattr(ending, "_let_survivors_continue", continued.append)

    def save(report: Failure) -> Failure:
        seen[2] = rank(2, state="dead")
        return report

    monkeypatch.setattr(ending, "_with_save", save)
    ending.end(replace(died(3), survivors=(0, 1, 2)))
    assert [report.survivors for report in continued] == [(0, 1)]


def test_under_torchrun_a_whole_host_is_lost() -> None:
    four = [rank(0), rank(1), rank(2), rank(3, state="dead")]
    assert find_survivors(four, died(3), by_host=True) == (0, 1)


@pytest.mark.parametrize(
    ("lost", "left"),
    [((2, 3), (0, 1)), ((0, 1), ()), ((3,), (0, 1, 2)), ((1, 2, 3), ())],
    ids=["half", "half, with rank 0", "fewer", "more"],
)
def test_in_a_partitioned_network_one_side_continues(lost: tuple[int, ...], left: tuple[int, ...]) -> None:
    four = [rank(number, heard_s=9.0 if number in lost else 0.0) for number in range(4)]
    assert find_survivors(four, died(*lost, kind="lost"), by_host=False) == left


def test_no_survivors_after_an_exception_or_an_exit_in_the_set_up_and_at_the_end() -> None:
    three = [rank(0), rank(1), rank(2, status=1)]
    assert find_survivors(three, died(2, kind="raised"), by_host=False) == ()
    child = subprocess.Popen(["false"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    left_itself = replace(three[2], status=None, state="dead", death=processes.death_of(child.pid))
    assert find_survivors([*three[:2], left_itself], died(2), by_host=False) == ()
    child.wait()
    for more in ({"step": 0}, {"phase": "end"}):
        some = [replace(three[0], **more), three[1], replace(three[2], state="dead")]
        assert find_survivors(some, died(2), by_host=False) == ()


def test_only_the_connections_of_groups_are_cut() -> None:
    other = socket.socketpair()
    with shrink.connecting():
        of_group = socket.socketpair()
        listener = socket.create_server(
            ("127.0.0.1", 0)
        )  # like that of gloo, whose thread would abort the process
    shrink.cut()
    assert of_group[0].recv(1) == b""
    other[0].send(b"x")
    assert other[1].recv(1) == b"x"
    with socket.create_connection(listener.getsockname()), listener.accept()[0]:
        pass
    for each in (*other, *of_group, listener):
        each.close()


class Part:
    """A stand-in for the parts of a run, which cannot be closed."""

    strategy = SimpleNamespace(close=lambda: 1 / 0)
    report = SimpleNamespace(profile=strategy, run_log=strategy)


def test_the_previous_run_is_not_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[weakref.ref[Part]] = []

    def shrinks_once(
        config: object, here: RankInfo | None, stop: object, at_shrink: contextlib.ExitStack
    ) -> dict[str, Any]:
        if here is not None:
            return {"kept": before[0]()}
        at_shrink.callback(run._close, part := Part())
        before.append(weakref.ref(part))
        raise shrink.Shrunk(RankInfo(0, 1, 0, 1, 0, None, None), Path("run"))

    monkeypatch.setattr(run, "_run", shrinks_once)
    monkeypatch.setattr(run, "publish", lambda here: None)
    assert run.run(settings())["kept"] is None


@pytest.mark.parametrize(("launcher", "hosts"), [("torchrun", (0, 0)), ("mpirun", (0, 1))])
def test_a_launcher_that_kills_the_other_ranks_raises(launcher: str, hosts: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=rf"shrink=true is not supported under {launcher}, .* launch=local"):
        shrink.check_launcher(RankInfo(0, 2, 0, 2, 0, launcher, "env://"), hosts)
    shrink.check_launcher(RankInfo(0, 2, 0, 1, 0, "torchrun", "env://"), (0, 1))
    shrink.check_launcher(RankInfo(0, 2, 0, 2, 0, "srun", "tcp://here:1"), (0, 0))


def test_the_reason_is_given_where_it_is_not_supported() -> None:
    cpu = torch.device("cpu")
    assert shrink.unsupported(cpu, "gloo", ["10.0.0.1", "10.0.0.2"]) is None
    assert shrink.unsupported(cpu, "gloo", ["127.0.0.1", "127.0.0.1"]) is None
    assert "nccl on cuda" in str(shrink.unsupported(torch.device("cuda", 0), "nccl", []))
    assert "loopback" in str(shrink.unsupported(cpu, "gloo", ["127.0.1.1", "10.0.0.2"]))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("strategy=fsdp",), "strategy=fsdp"),
        (("strategy=ddp", "checkpoint.on_failure=false"), "on_failure=false"),
        (("strategy=ddp", "checkpoint.remote=file:///there"), "checkpoint.remote=file"),
    ],
)
def test_contradictions(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=f"distributed.shrink=true is not supported with .*{words}"):
        settings("distributed.shrink=true", *overrides)


# ---- whole runs


def result(run_dir: Path) -> dict[str, object]:
    facts = json.loads((run_dir / "result.json").read_text())
    return {name: facts[name] for name in ("world_size", "steps", "param_sha256")}


def launched(ranks: int, run_dir: Path, *overrides: str) -> Ended:
    words = (*RUN, *EXACT, f"run_dir={run_dir}", "launch=local", f"launch.processes={ranks}", *overrides)
    return finish("train.py", *words, forks=True)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    (ended,) = finish_ranks(1, "train.py", *EXACT, f"run_dir={run_dir}")
    assert ended.code == 0, ended
    return str(result(run_dir)["param_sha256"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "comm"),
    [
        pytest.param(("kill", 0, 6, "all_reduce"), "ring", id="rank 0 is killed in the backward pass"),
        pytest.param(("kill", 1, 6, "evaluate"), "native", id="rank 1 is killed in the evaluation"),
        pytest.param(("stop", 2, 6, "forward"), "native", id="rank 2 is stopped"),
    ],
)
def test_the_survivors_end_with_the_same_bits(
    how: tuple[str, int, int, str], comm: str, uninterrupted: str, tmp_path: Path
) -> None:
    once = inject(*how, mark=tmp_path / "mark")  # not again on the new rank 0
    ended = launched(3, tmp_path / "run", f"comm={comm}", *once)
    assert ended.code == 0, ended.output
    assert re.search(r"step \d+ was saved by rank \d.*; continuing without a restart on rank", ended.output)
    facts = result(tmp_path / "run")
    assert (facts["world_size"], facts["param_sha256"]) == (2, uninterrupted), ended.output
    assert not (tmp_path / "run" / "failure.json").exists()
    assert not saved_settings(tmp_path / "run").distributed.shrink  # an evaluation cannot continue
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert steps == sorted(steps)


def kill_first_after(words: str, launcher: Program, run_dir: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if words in (run_dir / "train.log").read_text().partition("without a restart")[2]:
                os.kill(launcher.ranks()[0], signal.SIGKILL)
                return
        time.sleep(0.02)


@pytest.mark.slow
def test_a_second_death_while_the_survivors_restart(uninterrupted: str, tmp_path: Path) -> None:
    """The set-up is repeated again: the new rank 0 dies right after it has resumed."""
    words = (*RUN, *EXACT, f"run_dir={tmp_path}", "launch=local", "launch.processes=4", *inject("kill", 3, 6))
    with started("train.py", *words, forks=True) as launcher:
        kill_first_after("dry run of one step: ok", launcher, tmp_path)
        ended = launcher.wait()
    assert ended.code == 0, ended.output
    assert result(tmp_path)["param_sha256"] == uninterrupted


@pytest.mark.slow
def test_a_micro_batch_size_of_auto_is_found_again(tmp_path: Path) -> None:
    batch = ("train.exact=null", "train.global_batch_size=12", "train.micro_batch_size=auto")
    ended = launched(3, tmp_path, *batch, *inject("kill", 2, 6))
    assert ended.code == 0, ended.output
    assert re.findall(r"auto: chose (.*) samples per rank", ended.output) == ["4 of 4", "6 of 6"]
    assert result(tmp_path)["world_size"] == 2


@pytest.mark.slow
def test_a_batch_that_does_not_divide_ends_the_run(tmp_path: Path) -> None:
    batch = ("train.exact=null", "train.global_batch_size=8")
    ended = launched(4, tmp_path, *batch, *inject("kill", 3, 6))
    assert ended.code == 1
    assert (
        "the other ranks cannot continue: train.global_batch_size is 8, which is not divisible by the 3"
        in ended.output
    )
    assert (tmp_path / "failure.json").exists()
