"""Every way to start the same run of two processes ends with the same bits."""

from __future__ import annotations

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

ROOT = Path(__file__).parents[2]
RUN = ["train.max_steps=8", "seed=3", "distributed.device=cpu"]
TRAIN = [sys.executable, str(ROOT / "train.py")]

pytestmark = pytest.mark.slow


def ended(*commands: list[str], env: dict[str, str] | None = None, cwd: Path = ROOT) -> list[int]:
    """Run these at the same time, to the end."""
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


def test_the_status_of_real_ranks_arrives_from_anywhere(tmp_path: Path) -> None:
    """Of a mistake; for that of a loss that is NaN see the notebook of test_api.py, for a run that ends well
    the wheel below."""
    wrong = [*RUN, "train.global_batch_size=2001"]
    launch = ["launch=local", "launch.processes=2", "run_dir=here"]
    assert ended([*TRAIN, *wrong, *launch], cwd=tmp_path) == [2]
    assert "2001" in (tmp_path / "here" / "train.log").read_text()


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_by_hand(scheme: str, expected: str, tmp_path: Path) -> None:
    where = {"tcp": f"tcp://127.0.0.1:{free_port()}", "file": f"file://{tmp_path}/meet"}
    by_hand = [f"distributed.init_method={where[scheme]}", "distributed.world_size=2"]
    options = [*RUN, *by_hand, f"run_dir={tmp_path}/run"]
    with (
        started("train.py", *options, "distributed.rank=1") as one,
        started("train.py", *options, "distributed.rank=0") as other,
    ):
        ends = [one.wait(), other.wait()]
    assert [end.code for end in ends] == [0, 0], ends
    assert sha(tmp_path / "run") == expected


def test_mpirun(expected: str, tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun: apt-get install openmpi-bin")
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    mpirun = ["mpirun", "--oversubscribe", "-n", "2"]
    assert ended([*mpirun, *TRAIN, *RUN, f"run_dir={tmp_path}/run"], env=as_root) == [0]
    assert sha(tmp_path / "run") == expected


def test_srun_and_launch_slurm(expected: str, tmp_path: Path) -> None:
    with cluster(tmp_path / "slurm") as env:
        assert ended(["srun", "-N2", "-n2", *TRAIN, *RUN, f"run_dir={tmp_path}/srun"], env=env) == [0]
        launch = [*TRAIN, "launch=slurm", "launch.nodes=2", "launch.time=5"]
        assert ended([*launch, *RUN, f"run_dir={tmp_path}/sbatch"], env=env) == [0]
        assert ended([*launch, *RUN, "train.global_batch_size=2001", f"run_dir={tmp_path}/bad"], env=env) == [
            2
        ]
        assert ended([*launch, *RUN, "launch.partition=none", f"run_dir={tmp_path}/no"], env=env) == [2]
    assert sha(tmp_path / "srun") == sha(tmp_path / "sbatch") == expected


def test_a_wheel_in_an_empty_directory(expected: str, tmp_path: Path) -> None:
    """`pip install` of the wheel, where only its dependencies are installed."""
    source, empty, environment = tmp_path / "source", tmp_path / "empty", tmp_path / "environment"
    tracked = [
        "trainer",
        "models",
        "conf",
        "hydra_plugins",
        "ringmaster.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    ]
    for name in tracked:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(
            ROOT / name,
            (source / name) if (ROOT / name).is_dir() else (source.mkdir(exist_ok=True) or source / name),
        )
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
    assert ended([*pip, "--python", python, "install", "--quiet", "--no-deps", "--no-index", str(wheel)]) == [
        0
    ]
    command = [str(environment / "bin" / "ringmaster"), *RUN, "launch=local", "launch.processes=2"]
    assert ended([*command, "run_dir=run"], cwd=empty) == [0]
    assert sha(empty / "run") == expected
    assert (there / "hydra_plugins" / "ringmaster.py").exists(), "no sweep"
