"""launch=local: processes, messages about their ends, restarts, and clean-up."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.programs import started
from tests.runs import settings
from trainer.errors import UserError
from trainer.launch import local, new_process

ROOT = Path(__file__).parents[2]

# Replaces train.py where only the ends of ranks matter, because torch takes seconds to load.
ACTOR = """
import json, os, signal, sys, time
sys.path.insert(0, os.environ["HOUSE"])
from trainer.launch.new_process import die_with_parent
die_with_parent()
rank, run_dir = os.environ["RANK"], next(a[8:] for a in reversed(sys.argv) if a.startswith("run_dir="))
os.makedirs(run_dir, exist_ok=True)
attempt = len([f for f in os.listdir(run_dir) if f.startswith(rank + "-")])
with open(f"{run_dir}/new-{rank}", "w") as file:
    json.dump({"argv": sys.argv[1:], "env": dict(os.environ), "sid": os.getsid(0), "pid": os.getpid()}, file)
os.rename(file.name, f"{run_dir}/{rank}-{attempt}")
while not all(os.path.exists(f"{run_dir}/{other}-{attempt}") for other in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.01)  # otherwise, the end of a rank could prevent the start of another
script = json.loads(os.environ["ACT"])
act = script[min(attempt, len(script) - 1)].get(rank, "hang")
print("out of", rank)
print("err of", rank, file=sys.stderr)
if act.startswith("fault "):
    with open(run_dir + "/failure.json", "w") as file:
        json.dump({"status": 1, "step": int(act[6:]), "message": f"rank 0 (pid {os.getpid()}) failed"}, file)
    sys.exit(1)
signal.signal(signal.SIGTERM, (lambda *a: sys.exit(75)) if act == "save" else signal.SIG_DFL)
open(f"{run_dir}/ready-{rank}", "w").close()
if act == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if act in ("hang", "save"):
    time.sleep(60)
sys.exit(int(act))
"""

Launch = Callable[..., int]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Launches ranks with given actions: for each attempt, the action of each rank."""
    actor = tmp_path / "actor.py"
    actor.write_text(ACTOR)
    monkeypatch.setattr(new_process, "program", lambda: [sys.executable, str(actor)])
    monkeypatch.setattr(local, "_GRACE_S", 1.0)
    monkeypatch.setattr(local, "PAUSES_S", (0.0,))

    def launch(*attempts: dict[str, str], max_restarts: int = 0, more: Sequence[str] = ()) -> int:
        monkeypatch.setenv("ACT", json.dumps(attempts))
        monkeypatch.setenv("HOUSE", str(ROOT))
        overrides = ["launch=local", f"launch.processes={len(attempts[0])}", f"run_dir={tmp_path}/run"]
        overrides += [f"launch.max_restarts={max_restarts}", "model.hidden=[8]", *more]
        return local.launch(settings(*overrides), overrides)[0]

    return launch


def seen(tmp_path: Path) -> dict[str, dict]:  # type: ignore[type-arg]
    """Return what each rank saw in each attempt, by `rank-attempt`."""
    return {file.name: json.loads(file.read_text()) for file in (tmp_path / "run").glob("[0-9]-[0-9]")}


@pytest.mark.parametrize(
    ("acts", "status"),
    [
        ({"0": "0", "1": "0"}, 0),
        pytest.param({"0": "2", "1": "hang"}, 2, marks=pytest.mark.slow),
        pytest.param({"0": "3", "1": "1"}, 3, marks=pytest.mark.slow),
        ({"0": "hang", "1": "kill"}, 1),
    ],
)
def test_the_status_of_the_run_arrives(launch: Launch, acts: dict[str, str], status: int) -> None:
    assert launch(acts) == status


def test_each_rank_gets_its_rank_info_and_output_has_the_rank(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")  # set for the launcher, not for its ranks
    assert launch({"0": "0", "1": "0", "2": "kill"}) == 1
    for rank in range(3):
        found = seen(tmp_path)[f"{rank}-0"]
        env = found["env"]
        assert [env[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == [str(rank), str(rank), "3"]
        assert ("RINGMASTER_STORE_FD" in env, "SLURM_PROCID" in env) == (rank == 0, False)
        assert found["sid"] == found["pid"]
        assert "model.hidden=[8]" in found["argv"]
    out, err = capfd.readouterr()
    assert {"out of 0", "[rank 1] out of 1", "[rank 2] out of 2"} == {*out.splitlines()}
    assert "[rank 2] err of 2" in err
    assert "rank 2 was killed by SIGKILL: out of memory, or kill -9" in err


@pytest.mark.slow
def test_under_shrink_a_killed_rank_is_no_failure(launch: Launch) -> None:
    more = ("strategy=ddp", "distributed.shrink=true")
    assert launch({"0": "kill", "1": "0", "2": "0"}, more=more) == 0
    assert launch({"0": "kill", "1": "0", "2": "1"}, more=more) == 1
    assert launch({"0": "kill", "1": "75", "2": "75"}, max_restarts=1, more=more) == 75


def test_a_rank_that_another_rank_may_have_killed_is_reported_as_such(
    launch: Launch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch({"0": "kill", "1": "0", "2": "1"}) == 1
    said = "rank 0 was killed by SIGKILL: out of memory, or kill -9, or killed by rank 2 because it was stuck"
    assert said in capfd.readouterr().err


def test_restarts_only_what_a_restart_can_help(
    launch: Launch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000005"
    checkpoint.mkdir(parents=True)
    assert launch({"0": "fault 7"}, {"0": "kill"}, {"0": "0"}, max_restarts=5) == 0
    resumed = ["resume=auto" in seen(tmp_path)[f"0-{attempt}"]["argv"] for attempt in range(3)]
    assert resumed == [False, True, True]
    assert (
        "attempt 2 of 6 failed; restart 2 of 5, from the newest valid checkpoint, in"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ((), "resume=auto"),
        pytest.param(("resume=/a/checkpoint",), "resume=/a/checkpoint", marks=pytest.mark.slow),
    ],
)
def test_a_run_without_a_checkpoint_restarts_with_the_users_resume(
    launch: Launch, tmp_path: Path, more: Sequence[str], expected: str
) -> None:
    """Without resume, it would fail, because its directory contains files of the first attempt."""
    assert launch({"0": "fault 7"}, {"0": "0"}, max_restarts=1, more=more) == 0
    said = [word for word in seen(tmp_path)["0-1"]["argv"] if word.startswith("resume=")]
    assert said[-1:] == [expected]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ([{"0": "3"}], 1),
        ([{"0": "fault 7"}], 3),  # a disk may fail twice, and then work again
    ],
)
def test_a_final_error_is_not_retried_and_a_failure_is(
    launch: Launch, tmp_path: Path, attempts: list[dict[str, str]], expected: int
) -> None:
    assert launch(*attempts, max_restarts=2) != 0
    assert len(seen(tmp_path)) == expected


def interrupted(how: str, tmp_path: Path, number: int) -> int:
    """Return the exit code of a launch in a separate process that gets a signal once both ranks are ready."""
    actor = tmp_path / "actor.py"
    actor.write_text(ACTOR)
    overrides = ["launch=local", "launch.processes=2", f"run_dir={tmp_path}/run", "launch.max_restarts=3"]
    script = f"""
import sys
from tests.runs import settings
from trainer.launch import new_process, local
new_process.program = lambda: [sys.executable, {str(actor)!r}]
sys.exit(local.launch(settings(*{overrides}), {overrides})[0])
"""
    (tmp_path / "launcher.py").write_text(script)
    environment = {"HOUSE": str(ROOT), "ACT": json.dumps([{"0": how, "1": how}])}
    with started(str(tmp_path / "launcher.py"), env=environment) as launcher:
        deadline = time.monotonic() + 200
        while not all((tmp_path / "run" / f"ready-{rank}").exists() for rank in (0, 1)):
            assert launcher.poll() is None and time.monotonic() < deadline, launcher.stderr
            time.sleep(0.02)
        launcher.send_signal(number)
        return launcher.wait().code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "number", "status"),
    [
        ("save", signal.SIGINT, 75),
        ("hang", signal.SIGTERM, 128 + signal.SIGTERM),
        ("save", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_a_signal_stops_all_ranks_without_a_restart(
    how: str, number: int, status: int, tmp_path: Path
) -> None:
    """The guard in tests.conftest fails this test if a rank outlives its launcher, even if that was killed."""
    assert interrupted(how, tmp_path, number) == status
    assert len(seen(tmp_path)) == 2


def test_by_default_each_gpu_gets_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_attempt", lambda processes, *_, **__: (processes, None))

    def num_processes(gpus: int, *overrides: str) -> int:
        monkeypatch.setattr(new_process, "num_gpus", lambda: gpus)
        return local.launch(settings("launch=local", "strategy=ddp", *overrides), [], module="any")[0]

    shared = "distributed.ranks_per_gpu=4"
    assert [num_processes(gpus) for gpus in (0, 2)] == [1, 2]
    assert [num_processes(gpus, shared) for gpus in (0, 2)] == [1, 8]
    assert num_processes(2, "distributed.ranks_per_gpu=auto") == 2
    assert num_processes(2, shared, "launch.processes=3") == 3
    assert num_processes(2, shared, "distributed.device=cpu") == 1


def test_a_launch_within_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UserError, match="launch=local under a process that is already a rank would start 2 separate runs"
    ):
        local.launch(settings("launch=local"), [])


def test_the_script_that_called_main_is_what_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(new_process, "_user_script", [])
    ours = new_process.program()
    script = SimpleNamespace(__file__=str(tmp_path / "go.py"), __spec__=None)
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.setattr(sys, "argv", ["pytest", "a=1"])
    new_process.remember_script()
    assert new_process.program() == ours
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["go.py", "a=1"])
    new_process.remember_script()
    assert new_process.program() == [sys.executable, str(tmp_path / "go.py")]
    script.__spec__ = SimpleNamespace(name="mine.__main__")  # python -m mine
    new_process.remember_script()
    assert new_process.program() == [sys.executable, "-m", "mine"]
