"""All ways to start the same run with two processes give the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import finish, started, torchrun
from tests.ranks import free_port
from tests.slurm import cluster
from trainer.sweep.trials import DONE, FAILED, read_trials

ROOT = Path(__file__).parents[2]
RUN = ["train.max_steps=8", "seed=3", "distributed.device=cpu"]
TRAIN = [sys.executable, str(ROOT / "train.py")]

pytestmark = pytest.mark.slow


def ended(*commands: list[str], env: dict[str, str] | None = None, cwd: Path = ROOT) -> list[int]:
    """Run these commands at the same time until they end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    started = [subprocess.Popen(command, cwd=cwd, env=environment) for command in commands]
    return [process.wait(200) for process in started]


def sha(run_dir: Path) -> str:
    result = json.loads((run_dir / "result.json").read_text())
    assert result["world_size"] == 2
    return str(result["param_sha256"])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    run_dir = tmp_path_factory.mktemp("torchrun")
    assert finish(*torchrun(2), *RUN, f"run_dir={run_dir}").code == 0
    return sha(run_dir)


def test_start_by_hand(expected: str, tmp_path: Path) -> None:
    by_hand = [f"distributed.init_method=tcp://127.0.0.1:{free_port()}", "distributed.world_size=2"]
    options = [*RUN, *by_hand, f"run_dir={tmp_path}/run"]
    with (
        started("train.py", *options, "distributed.rank=1") as one,
        started("train.py", *options, "distributed.rank=0") as other,
    ):
        ends = [one.wait(), other.wait()]
    assert [end.code for end in ends] == [0, 0], ends
    assert sha(tmp_path / "run") == expected


def started_by(launcher: list[str], folder: Path, env: dict[str, str]) -> str:
    """Return the hash of a run with forked ranks that have the environment of `launcher`."""
    folder.mkdir()
    assert ended([*launcher, "sh", "-c", f"env -0 > {folder}/$$"], env=env) == [0]
    with contextlib.ExitStack() as stack:
        ranks = []
        for file in list(folder.iterdir()):
            env = dict(entry.split("=", 1) for entry in file.read_text().split("\0") if entry)
            ranks.append(stack.enter_context(started("train.py", *RUN, f"run_dir={folder}/run", env=env)))
        ends = [rank.wait() for rank in ranks]
    assert [end.code for end in ends] == [0, 0], ends
    return sha(folder / "run")


def test_mpirun(expected: str, tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun: apt-get install openmpi-bin")
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert started_by(["mpirun", "--oversubscribe", "-n", "2"], tmp_path / "ranks", as_root) == expected


def test_srun_and_launch_slurm(expected: str, tmp_path: Path) -> None:
    def launched(*words: str) -> int:
        launch = ("launch=slurm", "launch.nodes=2", "launch.time=5", f"run_dir={tmp_path}/sbatch")
        return finish("train.py", *launch, *RUN, *words, env=env).code

    with cluster(tmp_path / "slurm") as env:
        env["MASTER_ADDR"] = "127.0.0.1"  # the names of its nodes do not resolve
        assert started_by(["srun", "-N2", "-n2"], tmp_path / "ranks", env) == expected
        assert launched() == 0
        assert sha(tmp_path / "sbatch") == expected
        bad = f"run_dir={tmp_path}/bad"
        assert launched("launch.nodes=1", "launch.setup=[exit 2]", bad) == 2
        assert launched("launch.partition=none", bad) == 2
        sweep = (
            "-m",
            "launch=slurm",
            "launch.time=5",
            "optim.lr=0.1,1e9",
            f"hydra.sweep.dir={tmp_path}/sweep",
        )
        assert finish("train.py", *sweep, *RUN, env=env).code == 3
        assert [trial.state for trial in read_trials(tmp_path / "sweep")] == [DONE, FAILED]


def test_a_wheel_in_an_empty_directory(tmp_path: Path) -> None:
    """`pip install` of the wheel, where only its dependencies are installed."""
    source, empty, environment = tmp_path / "source", tmp_path / "empty", tmp_path / "environment"
    source.mkdir()
    for name in ("trainer", "models", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("ringmaster.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    empty.mkdir()
    pip = [sys.executable, "-m", "pip"]
    assert ended([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]) == [0]
    assert ended([sys.executable, "-m", "venv", "--without-pip", str(environment)]) == [0]
    here, there = (
        next(Path(prefix).glob("lib/python*/site-packages")) for prefix in (sys.prefix, environment)
    )
    (there / "dependencies.pth").write_text(f"{here}\n")
    wheel = next(tmp_path.glob("*.whl"))
    python = str(environment / "bin" / "python")
    install = [*pip, "--python", python, "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    assert ended(install) == [0]
    command = [str(environment / "bin" / "ringmaster"), *RUN, "launch=local", "launch.processes=1"]
    assert ended([*command, "run_dir=run"], cwd=empty) == [0]
    assert (empty / "run" / "result.json").exists()
    assert (there / "hydra_plugins" / "ringmaster.py").exists(), "no sweep"
