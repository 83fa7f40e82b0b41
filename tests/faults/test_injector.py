"""Injected faults: each has its effect on its rank, at its step and phase, once in a run."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.runs import context_of, settings, train
from tests.training.test_replica_check import QUICK
from trainer.config import RankFaultConfig
from trainer.errors import NonFiniteError, ReplicasDifferError, UserError
from trainer.faults.heartbeat import Heartbeat
from trainer.faults.injection.injector import MARKER, FaultInjector, InjectedError

STEPS = ("train.max_steps=5", "train.eval_every_epochs=1", "checkpoint.every_steps=2")


def ends(*runs: tuple[str, ...]) -> list[tuple[str, str]]:
    """Type and message of the end of each run, in order."""
    from trainer.loop import fit

    seen = []
    for overrides in runs:
        try:
            with context_of(*QUICK, *STEPS, *overrides) as context:
                fit(context)
            seen.append(("ended well", ""))
        except (InjectedError, NonFiniteError, ReplicasDifferError, UserError) as error:
            seen.append((type(error).__name__, str(error)))
            if dist.is_initialized():  # an error leaves it to the end of the process, which is not now
                dist.destroy_process_group()
    return seen


@pytest.mark.slow
def test_a_phase_is_hit_once_in_a_run(tmp_path: Path) -> None:
    phases = {"data": 3, "forward": 3, "backward": 3, "optimizer": 3, "evaluate": 5, "checkpoint": 4}
    faults = {phase: ("fault=raise", "fault.rank=0", f"fault.phase={phase}") for phase in phases}
    runs = [(*fault, "fault.step=3", f"run_dir={tmp_path}/{phase}") for phase, fault in faults.items()]
    runs += [runs[-1], (*runs[-1], "fault.step=2")]
    ((*first, again, another),) = run_ranks(ends, 1, *runs, init=False)
    for (phase, step), end in zip(phases.items(), first, strict=True):
        assert end == ("InjectedError", f"fault=raise, as asked for: rank 0, step {step}, {phase}")
    assert again == ("ended well", "")
    assert another[0] == "InjectedError"
    assert json.loads((tmp_path / phase / MARKER).read_text())["fault"]["step"] == 2


@pytest.mark.slow
def test_ranks_are_hit_where_they_should(tmp_path: Path) -> None:
    def here(name: str, *overrides: str) -> tuple[str, ...]:
        return (f"run_dir={tmp_path}/{name}", f"fault={name}", *overrides)

    runs = [
        here("nan", "fault.step=3"),
        here(
            "diverge",
            "fault.step=2",
            "fault.rank=2",
            "train.check_replicas_every=3",
            "checkpoint.every_steps=null",
        ),
        (
            *here("diverge", "fault.step=5"),
            "fault.tensor='exp_avg of layers.0.bias'",
            f"run_dir={tmp_path}/tensor",
        ),
        here("slow", "fault.step=2", "fault.seconds=0.1"),
        here("kill", "fault.rank=3", "fault.step=2"),
        here("kill", "fault.step=3", "train.max_steps=null", "train.epochs=1", "fault.step=6"),
        here("cut", "fault.step=2", "fault.host=2"),
    ]
    for nan, first, of_optimizer, slow, rank, step, host in run_ranks(
        ends, 3, *runs, hosts=[0, 0, 1], init=False
    ):
        assert nan[0] == "NonFiniteError"
        assert "the loss of step 3 is NaN or Inf on rank 1 (host 0)" in nan[1]
        assert "after step 3: rank 2 (host 1), unlike ranks 0, 1, first in layers.0.weight." in first[1]
        assert "rank 1 (host 0), unlike ranks 0, 2, first in" in of_optimizer[1]
        assert "layers.0.bias" in of_optimizer[1]
        assert slow == ("ended well", "")
        assert rank == ("UserError", "fault.rank is 3, but the ranks of this run are 0 to 2")
        assert step == ("UserError", "fault.step is 6, but the run has 5 steps")
        assert host == ("UserError", "fault.host is 2, but the hosts of this run are 0 to 1")


def up_to_nan(run_dir: Path) -> None:
    with pytest.raises(NonFiniteError):
        train(*QUICK, f"run_dir={run_dir}", "fault=nan", "fault.step=2")


@pytest.mark.slow
def test_failure_json_names_whom_the_error_is_about(tmp_path: Path) -> None:
    run_ranks(up_to_nan, 2, tmp_path, init=False)
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert (failure["status"], failure["rank"], failure["step"]) == (3, 1, 2)


def strike(kind: str, run_dir: Path) -> int:
    """The pid of a process that gets the fault in its second step."""
    fault = RankFaultConfig(kind=kind, rank=0, step=2, phase="forward")
    pid = os.fork()
    if not pid:
        heartbeat = FaultInjector(fault, 0, [0], run_dir).heartbeat(Heartbeat())
        for step in (1, 2, 3):
            heartbeat.step = step
            heartbeat.enter("forward")
        os._exit(0)
    return pid


@pytest.mark.parametrize("kind", ["kill", "exit", "stop", "hang"])
def test_what_ends_or_holds_a_process(kind: str, tmp_path: Path) -> None:
    pid = strike(kind, tmp_path)
    deadline = time.monotonic() + 100
    while not (tmp_path / MARKER).exists():
        assert time.monotonic() < deadline
    if kind == "hang":
        time.sleep(0.2)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    else:
        status = os.waitpid(pid, os.WUNTRACED)[1]
        if kind == "stop":
            assert os.WIFSTOPPED(status)
        else:
            assert os.waitstatus_to_exitcode(status) == {"kill": -signal.SIGKILL, "exit": 1}[kind]
    if kind in ("hang", "stop"):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("fault=kill", "fault.step=0"), "fault.step is 0, but must be at least 1"),
        (("fault=kill", "fault.phase=lunch"), "fault.phase is lunch, but must be one of data, forward"),
        (("fault=kill", "train.max_steps=9"), "fault.step is 10, but the run has train.max_steps=9"),
        pytest.param(
            ("fault=kill", "fault.phase=evaluate", "train.eval_every_epochs=0"),
            "fault.phase=evaluate never happens",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("fault=kill", "fault.phase=all_reduce", "strategy=fsdp"),
            "never happens with strategy=fsdp comm=auto; use",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("fault=kill", "fault.phase=all_reduce", "comm.timeline=false"),
            "comm.timeline=false; set it to true",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("fault.kind=quake",),
            "fault.kind is quake, but must be one of none, kill",
            marks=pytest.mark.slow,
        ),
        pytest.param(("+fault.rank=1",), "fault.rank is not a setting", marks=pytest.mark.slow),
    ],
)
def test_refuses_what_never_comes(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError) as refused:
        settings(*overrides)
    assert words in str(refused.value)


def test_no_fault_leaves_the_heartbeat_alone(tmp_path: Path) -> None:
    heartbeat: Any = Heartbeat()
    assert FaultInjector(settings().fault, 0, [0], tmp_path).heartbeat(heartbeat) is heartbeat
