"""Ends of failed runs: the reported rank, the output, and no remaining process."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.failure_parts import inject
from tests.programs import finish, finish_ranks, torchrun
from tests.ranks import ROOT, RankFailure, rank_variables, run_ranks
from tests.runs import context_of, train

TINY = (
    "logger=jsonl",
    "data.dataset._target_=tests.user_parts.Stripes",
    "model._target_=tests.user_parts.Tiny",
    "~model.input_shape",
    "~model.num_classes",
    "~model.hidden",
    "train.global_batch_size=24",
    "train.epochs=2",
)
PATIENCE_S = 4  # on a busy machine, a tenth of a second becomes seconds


def failing(rank: int, call: int, how: str) -> tuple[str, ...]:
    return (
        "data.task._target_=tests.user_parts.FailsAt",
        "~data.task.label_smoothing",
        f"+data.task.rank={rank}",
        f"+data.task.call={call}",
        f"+data.task.how='{how}'",
    )


def really(*argv: str) -> tuple[int, str]:
    """Return exit code and output of `python ARGV`, not forked, to test the interpreter or torchrun."""
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout + done.stderr


# ---- mistakes


def refusals(*mistakes: tuple[str, ...]) -> list[str]:
    messages = []
    for mistake in mistakes:
        try:
            train("run_dir=/nowhere/that/exists", *mistake)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
            if dist.is_initialized():  # after an error, only the end of the process would destroy it
                dist.destroy_process_group()
        else:
            messages.append("accepted")
    return messages


@pytest.mark.parametrize(
    ("world_size", "mistakes"),
    [
        pytest.param(
            1,
            {
                ("train.micro_batch_size=30",): r"micro_batch_size is 30.*nearest valid value: 32",
                ("train.global_batch_size=2000",): r"1438 samples, fewer than one global batch of 2000",
                ("distributed.device=cuda",): r"distributed.device=cuda, but torch sees no GPU",
                ("+model.foo=1",): r"model: models.mlp.MLP .*'foo'",
                ("model._target_=models.mlp.Mlp",): r"model: .*models.mlp.Mlp",
                ("schedule.warmup_steps=100000",): r"schedule.warmup_steps=100000, but this run ends after "
                r"660 steps; set schedule.warmup_steps=66 ",
                ("model.num_classes=7",): r"model.num_classes=7 is too small: the data has 10 classes, and "
                r"its largest label is 9; set model.num_classes=10",
                ("checkpoint.keep_best={metric:eval/acuracy,mode:max}",): r"keep_best.metric=eval/acuracy "
                r"is not a metric of the evaluation; use one of eval/loss, eval/accuracy",
                (
                    "data.dataset._target_=tests.user_parts.Stripes",
                ): r"model.input_shape is auto, but Stripes has no",
                ("resume=/nowhere",): r"/nowhere",
                ("model.init_from=/nowhere",): r"/nowhere",
            },
            marks=pytest.mark.slow,
        ),
        (
            2,
            {
                ("strategy=dp",): r"strategy=dp runs in one process, not in 2",
                ("strategy=single",): r"strategy=single runs in one process, not in 2",
                (
                    "train.global_batch_size=63",
                ): r"global_batch_size is 63.*2 replicas; nearest valid value: 62",
                (
                    "strategy=fsdp",
                    "strategy.shard_group=3",
                ): r"strategy.shard_group=3 does not divide the 2 ranks",
            },
        ),
    ],
    ids=["one process", "two ranks"],
)
def test_mistakes_raise_errors_with_a_way_out(
    world_size: int, mistakes: dict[tuple[str, ...], str], tmp_path: Path
) -> None:
    if torch.cuda.is_available():
        pytest.skip("these are the refusals of a machine without a GPU")
    options = [("logger=jsonl", *mistake, f"run_dir={tmp_path}") for mistake in mistakes]
    for rank in run_ranks(refusals, world_size, *options, init=False):
        for message, pattern in zip(rank, mistakes.values(), strict=True):
            assert message.startswith("UserError: ")
            assert re.search(pattern, message), message


@pytest.mark.slow
def test_a_mistake_is_printed_once_under_torchrun(tmp_path: Path) -> None:
    ended = finish(*torchrun(2), "train.global_batch_size=2001", f"run_dir={tmp_path}")
    assert ended.code != 0
    said, table = ended.output.split("Root Cause")  # of torchrun
    assert said.count("train.global_batch_size") == 1, ended.output
    assert "train.global_batch_size is 2001, which is not divisible by the 2 replicas" in table, ended.output


def test_a_message_of_another_rank_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 may load torch for longer than the other ranks wait, or take long to exit."""
    from trainer.launch import exits

    monkeypatch.setattr(exits, "_printed", [])
    monkeypatch.setattr(exits.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("MASTER_PORT", f"of {os.getpid()}")
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in ("1", "2", "0"):
        monkeypatch.setenv("RANK", rank)
        exits._print_once("the same")
        exits._print_once(f"{rank} alone")
    said = capsys.readouterr().err.splitlines()
    assert said == ["[rank 1] the same", "[rank 1] 1 alone", "[rank 2] 2 alone", "0 alone"]


@pytest.mark.slow
def test_an_unknown_setting_raises_before_torch_is_loaded() -> None:
    code, output = really("-X", "importtime", "train.py", "train.epoch=1")
    said = [line for line in output.splitlines() if not line.startswith("import time:")]
    assert (code, len(said), said[1]) == (2, 2, "  see docs/howto/troubleshooting.md#unknown-setting"), said
    assert "train.epoch is not a setting" in said[0]
    assert re.search(r"\| +omegaconf$", output, re.MULTILINE) and not re.search(
        r"\| +torch$", output, re.MULTILINE
    )


@pytest.mark.slow
def test_a_sweep_inside_ranks_raises() -> None:
    # No rank connects to this address.
    env = {**rank_variables(0, [0, 0]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    ended = finish("train.py", "-m", "optim.lr=0.1,0.2", env=env)
    assert (ended.code, ended.output.count("-m (multirun) under a multi-process launch")) == (2, 1), ended


# ---- ranks that disagree


def with_own_overrides(run_dir: Path, *by_rank: str) -> None:
    train(f"run_dir={run_dir}", *TINY, by_rank[int(os.environ["RANK"])])


def test_different_settings_raise(tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(with_own_overrides, 2, tmp_path, "seed=0", "seed=5", init=False)
    assert len(failure.value.reports) == 2
    for report in failure.value.reports.values():
        assert "rank 1 (host 0) differs from rank 0 in seed: 5 instead of 0" in report


def with_other(part: str, run_dir: Path) -> None:
    import tests.user_parts as parts

    if os.environ["RANK"] == "1":
        model, data = parts.Tiny.__init__, parts.Stripes.__init__
        if part == "model":
            parts.Tiny.__init__ = lambda self: model(self, width=9)  # type: ignore[method-assign, misc]
        else:
            parts.Stripes.__init__ = lambda self, split: data(self, split, 120)  # type: ignore[method-assign, misc]
    train(f"run_dir={run_dir}", *TINY)


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("model", "parameter layers.0.bias: '(9,) torch.float32' instead of '(8,) torch.float32'"),
        pytest.param("data", "the length of the training data: 120 instead of 128", marks=pytest.mark.slow),
    ],
)
def test_different_data_or_models_raise(part: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(with_other, 2, part, tmp_path, init=False)
    assert len(failure.value.reports) == 2
    assert all(f"differs from rank 0 in {named}" in report for report in failure.value.reports.values())


def test_a_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        by_hand = ("distributed.rank=0", "distributed.world_size=2", f"distributed.init_method={address}")
        ended = finish("train.py", *by_hand)
    assert ended.code == 2
    assert (
        f"the port of {address} is already in use on this host, perhaps by another run; set" in ended.output
    )


# ---- remaining threads


LEAVES = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from trainer.launch.exits import ends_its_threads
atexit.register(print, "at exit")
with ends_its_threads():
    print("begun")
    (idle := ThreadPoolExecutor(thread_name_prefix="idle")).submit(print, "worked").result()
    {start}
    {end}
"""
THREAD = 'threading.Thread(target=threading.Event().wait, name="uploader").start()'
POOL = '(pool := ThreadPoolExecutor(thread_name_prefix="uploader")).submit(time.sleep, 300); time.sleep(0.5)'


def test_python_ends_an_idle_pool() -> None:
    assert really("-c", LEAVES.format(start="", end="")) == (0, "begun\nworked\nat exit\n")


@pytest.mark.parametrize(
    ("start", "end", "code", "said"),
    [(THREAD, "pass", 0, ""), (POOL, "sys.exit(75)", 75, ""), (THREAD, "1 / 0", 1, "ZeroDivisionError")],
)
def test_a_remaining_thread_of_a_program_ends_with_it(start: str, end: str, code: int, said: str) -> None:
    status, output = really("-c", LEAVES.format(start=start, end=end))
    assert (status, output.splitlines()[:3]) == (code, ["begun", "worked", "at exit"])
    assert said in output and re.search("0] the program ends without waiting for thread uploader", output)


@pytest.mark.slow
def test_a_remaining_thread_of_a_run_ends_with_it(tmp_path: Path) -> None:
    leaves = ("data.task._target_=tests.user_parts.LeavesAThread", "~data.task.label_smoothing")
    ended = finish("train.py", *TINY, *leaves, f"run_dir={tmp_path}", "train.max_steps=1")
    assert ended.code == 0 and "without waiting for thread uploader" in ended.stderr, ended
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 1


# ---- non-finite losses


def up_to_nan(run_dir: Path) -> dict[str, Any]:
    from trainer.errors import NonFiniteError
    from trainer.loop import fit

    history: list[list[torch.Tensor]] = []
    with context_of(
        *TINY, *failing(1, 5, "nan"), f"run_dir={run_dir}", "checkpoint.every_epochs=null"
    ) as context:
        step = context.state.optimizer.step
        context.state.optimizer.step = lambda *args: (  # type: ignore[method-assign]
            step(*args),
            history.append([parameter.detach().clone() for parameter in context.model.parameters()]),
        )
        with pytest.raises(NonFiniteError, match=r"the loss of step 5 is NaN or Inf on rank 1 \(host 0\)"):
            fit(context)
        weights = zip(history[-1], context.model.parameters(), strict=True)
        return {"updates": len(history), "unchanged": all(torch.equal(a, b) for a, b in weights)}


def test_a_non_finite_loss_stops_all_ranks_before_the_update(tmp_path: Path) -> None:
    found = run_ranks(up_to_nan, 2, tmp_path, init=False)
    assert found == [{"updates": 4, "unchanged": True}] * 2


ENDS = {
    "nan": (3, 3, "the loss of step 3 is NaN or Inf on rank 1 (host 0"),
    "nan_gradient": (3, 3, "is NaN or Inf in step 3 on some rank"),
    "raise": (1, 3, "failed in the forward pass of step 3, at tests/failure_parts.py"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENDS)
def test_all_ranks_exit_with_the_status_of_the_failure_and_report_its_rank(kind: str, tmp_path: Path) -> None:
    status, step, words = ENDS[kind]
    options = (f"distributed.timeout_s={PATIENCE_S}", f"run_dir={tmp_path}")
    ranks = finish_ranks(3, "train.py", *TINY, *options, *inject(kind, step=3))
    assert [rank.code for rank in ranks] == [status] * 3, ranks
    failure = json.loads((tmp_path / "failure.json").read_text())
    known = None if kind == "nan_gradient" else 1  # gradients are already averaged
    assert (failure["status"], failure["rank"], failure["step"]) == (status, known, step), failure
    assert words in failure["message"]


# ---- ranks that fail, die or hang


def test_an_exception_of_a_rank_is_written_for_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun writes it for forked ranks; ranks started as programs write it themselves."""
    from trainer.launch import exits

    monkeypatch.setattr(exits, "signal_at_parents_death", lambda: None)  # it would apply to this process
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(RuntimeError), exits.exits():
        raise RuntimeError("the answer was 41")
    child_error = json.loads((tmp_path / "error.json").read_text())["message"]
    assert child_error["message"] == "RuntimeError: the answer was 41"
    assert "tests/failures/test_ends.py" in child_error["extraInfo"]["py_callstack"]


def quiet(run_dir: Path, *overrides: str) -> None:
    train(f"run_dir={run_dir}", *TINY, *overrides)


def stuck_at(index: int, how: str) -> tuple[str, ...]:
    stuck = ("data.dataset._target_=tests.user_parts.StuckAt", f"+data.dataset.index={index}")
    return (*stuck, f"+data.dataset.how={how}", "data.num_workers=2", f"distributed.timeout_s={PATIENCE_S}")


def ends_of(*runs: tuple[str, ...]) -> None:
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5  # a loader waits 5 s for its workers by default
    for overrides in runs:
        with contextlib.suppress(Exception):
            train(*TINY, *overrides)
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.slow
def test_the_line_and_sample_of_a_stuck_data_worker_are_reported(tmp_path: Path) -> None:
    runs = {"loop": stuck_at(7, "loop"), "killed": stuck_at(7, "SIGKILL")}
    options = [(*overrides, f"run_dir={tmp_path}/{name}") for name, overrides in runs.items()]
    run_ranks(ends_of, 1, *options, init=False)
    said = {name: json.loads((tmp_path / name / "failure.json").read_text())["message"] for name in runs}
    stuck = r"its data worker \d+ has been reading sample 7 for [\d.]+ s, at tests/user_parts.py:\d+ in _act"
    assert re.search(stuck, said["loop"]), said
    killed = r"its data worker \d+ (died of SIGKILL|died without a message) while it read sample 7"
    assert re.search(killed, said["killed"]), said


HANGS = {"SIGKILL": "died", "SIGSTOP": "stopped", "loop in C": "hangs", "exit": "raised"}


@pytest.mark.slow
@pytest.mark.parametrize("how", HANGS)
def test_the_rank_that_others_wait_for_is_reported(how: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(quiet, 3, tmp_path, f"distributed.timeout_s={PATIENCE_S}", *failing(1, 3, how), init=False)
    assert [failure.value.reports[rank] for rank in (0, 2)] == ["died with exit code 1"] * 2
    report = json.loads((tmp_path / "failure.json").read_text())
    assert (report["rank"], report["step"], report["phase"]) == (1, 3, "forward")
    assert report["kind"] == HANGS[how]
    assert ("holds the interpreter lock" in report["message"]) == (how == "loop in C")
    if not how.startswith("SIG"):
        assert re.fullmatch(r"tests/user_parts.py:\d+ in _act", report["where"]), report


@pytest.mark.slow
def test_the_root_cause_of_torchrun_is_the_failure(tmp_path: Path) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py")
    _, output = really(*launch, *TINY, *failing(1, 3, "SIGKILL"), f"run_dir={tmp_path}")
    cause = output.partition("Root Cause")[2]
    # If torchrun has already collected the process, its signal is unknown.
    assert re.search(r"traceback : rank 1 .* (died of SIGKILL|died without a message)", cause), output


@pytest.mark.slow
def test_a_rank_that_hangs_in_the_set_up_is_reported(tmp_path: Path) -> None:
    """Before checkpoint.timeout_s, the hour for which its group would wait for a disk."""
    made = "data.dataset._target_=tests.user_parts.StuckWhenMade"
    with pytest.raises(RankFailure) as failure:
        run_ranks(quiet, 3, tmp_path, made, f"distributed.timeout_s={PATIENCE_S}", init=False)
    assert [failure.value.reports[rank] for rank in (0, 2)] == ["died with exit code 1"] * 2
    report = json.loads((tmp_path / "failure.json").read_text())
    assert (report["rank"], report["phase"], report["kind"]) == (1, "set_up", "hangs")
    assert re.fullmatch(r"tests/user_parts.py:\d+ in __init__", report["where"]), report


@pytest.mark.slow
def test_a_slow_rank_is_reported_and_the_run_continues(tmp_path: Path) -> None:
    slow = ("distributed.timeout_s=10", f"run_dir={tmp_path}", *inject("slow", step=4, seconds=3))
    ranks = finish_ranks(2, "train.py", *TINY, *slow)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    output = "".join(rank.output for rank in ranks)
    assert re.search(
        r"rank 1 \(.*\) has been in the forward pass of step 4 for [\d.]+ s.*; the other ranks are waiting for it",
        output,
    )
