"""launch=kubernetes: the JobSet it prints, its pods as they meet and end, and a run that goes on in new ones."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hosts import Host, hosts
from tests.launch.pods import container_of, pods, printed
from tests.programs import Ended, finish_ranks
from tests.ranks import ROOT
from tests.runs import settings
from trainer.api import train
from trainer.errors import NonFiniteError, StoppedBySignal, UserError
from trainer.launch import kubernetes
from trainer.launch.host import HostPlace, host_place
from trainer.launch.place import place

TWO = ("launch.nodes=2", "launch.processes=4")
KEYS = "launch.container={envFrom: [{secretRef: {name: s3-keys}}], env: [{name: A, value: b}]}"
POOL = "launch.pod={nodeSelector: {pool: a100}, volumes: [{name: d, emptyDir: {}}]}"


def _valid(job_set: dict[str, Any]) -> None:
    """Raises what the two schemas find: that of JobSet, and Kubernetes's own of the Job in it."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    model = models.JobsetV1alpha2JobSet.from_dict(deepcopy(job_set))
    assert model.to_dict() == job_set, "a field that the schema does not know is left out"
    (replicated,) = job_set["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **replicated["template"]}
    for version in ("1.31", kubernetes_validate.latest_version()):
        kubernetes_validate.validate(job, version, strict=True)


@pytest.mark.parametrize("further", [(), TWO, (*TWO, "launch.gpus=4", KEYS, POOL)])
def test_what_is_printed_is_a_valid_job_set(further: tuple[str, ...]) -> None:
    job_set = printed(*further)
    _valid(job_set)
    job = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    for broken in ({"completion": 2}, {"completions": "2"}):
        wrong = deepcopy(job_set)
        wrong["spec"]["replicatedJobs"][0]["template"]["spec"] |= broken
        with pytest.raises(Exception, match=r"completion|valid"):
            _valid(wrong)
    if KEYS in further:
        container, pod = container_of(job_set), job["template"]["spec"]
        assert container["resources"] == {"limits": {"nvidia.com/gpu": 4}}
        assert [entry["name"] for entry in container["env"]][-1] == "A" and len(container["env"]) == 6
        assert pod["nodeSelector"] == {"pool": "a100"} and len(pod["volumes"]) == 2


def test_the_rules_know_the_statuses() -> None:
    spec = printed()["spec"]
    rules = spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    final = {UserError.exit_code, NonFiniteError.exit_code}
    assert set(rules[0]["onExitCodes"]["values"]) == final | {StoppedBySignal.exit_code}
    by_message, otherwise = spec["failurePolicy"]["rules"]
    (pattern,) = by_message["onJobFailureMessagePatterns"]
    for status in (2, 3, 75):  # as Kubernetes writes it
        message = f"Container ringmaster for pod a/b-node-0-1 failed with exit code {status} matching FailJob rule at index 0"
        assert bool(re.search(pattern, message)) == (status in final)
    assert by_message["action"] == "FailJobSet"
    assert otherwise["action"] == "RestartJobSetAndIgnoreMaxRestarts"


def test_the_pods_take_the_command_line() -> None:
    job_set = printed(*TWO, "strategy=fsdp", r"run_dir='it\'s, one'", "resume=auto", "+model.more=1")
    assert container_of(job_set)["args"] == [
        "strategy=fsdp",
        "+model.more=1",
        "launch=local",
        r"run_dir='it\'s, one'",
        "resume=auto",
    ]
    with pytest.raises(UserError, match=r"resume=runs/a is where each restart would begin again"):
        printed("resume=runs/a")
    with pytest.raises(UserError, match=r"launch.job_name is My_job, but must be up to 40 lower-case"):
        printed("launch.job_name=My_job")
    with pytest.raises(UserError, match=r"env is \{'A': 'b'\}, but must be a list"):
        printed("launch.container={env: {A: b}}")


def test_the_page_shows_what_is_printed_and_a_train_job() -> None:
    text = (ROOT / "docs/howto/kubernetes.md").read_text()
    train_job, job_set = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.S))
    command = next(line for line in text.splitlines() if "launch.dry_run=true" in line)
    assert printed(*command.partition("#")[0].split()[3:]) == job_set
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    assert models.TrainerV1alpha1TrainJob.from_dict(deepcopy(train_job)).to_dict() == train_job


FAKE = """#!/bin/sh
[ "$*" = "create -f -" ] && grep -q "kind: JobSet" && echo "$SAYS" && exit $STATUS
"""


@pytest.mark.parametrize("status", [0, 1])
def test_kubectl_submits(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings("launch=kubernetes")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"needs kubectl, .* `kubectl create -f -`"):
        kubernetes.launch(config, [])
    assert "after a restart the run begins at step 0" in capsys.readouterr().err
    with pytest.raises(UserError, match="checkpoint=sharded needs a disk that all pods share"):
        kubernetes.launch(settings("launch=kubernetes", "launch.nodes=2", "checkpoint=sharded"), [])
    (tmp_path / "kubectl").write_text(FAKE)
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    monkeypatch.setenv("SAYS", "jobset.x-k8s.io/ringmaster created")
    monkeypatch.setenv("STATUS", str(status))
    if status:
        with pytest.raises(UserError, match="kubectl refuses the job: "):
            kubernetes.launch(config, [])
        return
    assert kubernetes.launch(settings("launch=kubernetes", "checkpoint.remote=file:///x"), []) == 0
    said = capsys.readouterr()
    assert said.out.startswith("jobset.x-k8s.io/ringmaster created  ->  kubectl logs -f -l jobset")
    assert not said.err
    with pytest.raises(UserError, match="leave no result to return"):
        train(["launch=kubernetes"], None, ())


# ---- a host's place


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def told(**variables: str) -> HostPlace:
        for name, value in variables.items():
            monkeypatch.setenv(f"PET_{name}", value)
        return host_place()

    yield told


def test_a_host_is_told_its_place(told: Any) -> None:
    assert told() == HostPlace()
    assert told(NNODES="1", NPROC_PER_NODE="auto") == HostPlace()
    assert told(NPROC_PER_NODE="4") == HostPlace(processes=4)
    with pytest.raises(UserError, match="PET_NNODES=2, but PET_NODE_RANK is not set"):
        told(NNODES="2")
    where = {"NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29400"}
    assert told(**where) == HostPlace(1, 2, "a", 29400, 4)
    with pytest.raises(UserError, match="PET_NNODES=2, but this process was not started by torchrun"):
        place(settings().distributed)
    for wrong, said in (
        ({"NODE_RANK": "2"}, "hosts count from 0 to 1"),
        ({"NODE_RANK": "x"}, "PET_NODE_RANK=x, but must be a number"),
        ({"NNODES": "1:4"}, "PET_NNODES=1:4, but must be a number"),
        ({"NNODES": "2", "NODE_RANK": "0", "NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE=0, but .* at least 1"),
    ):
        with pytest.raises(UserError, match=said):
            told(**wrong)


# ---- pods


TRAIN = ("logger=jsonl", "train.log_every_steps=10", "train.eval_every_epochs=0", "checkpoint.every_steps=5")
TRAIN += ("checkpoint.every_epochs=null", "train.max_steps=15", "distributed.device=cpu", "seed=3")


def _ended(hosts: list[Host], disks: Path, *argv: str) -> list[Ended]:
    with pods(hosts, disks, *argv) as programs:
        return [program.wait() for program in programs]


def _wait_for(path: Path, programs: list[Any]) -> None:
    deadline = time.monotonic() + 200
    while not path.exists():
        assert time.monotonic() < deadline, "\n".join(each.stdout + each.stderr for each in programs)
        assert all(each.poll() is None for each in programs), [each.stdout + each.stderr for each in programs]
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.netns
def test_a_run_goes_on_in_new_pods_to_the_same_bits(tmp_path: Path) -> None:
    """Two pods of two processes, of which one gets SIGKILL; the new pods have nothing but the remote's address.

    Under fsdp, where all ranks hold a part; tests/faults kills the others.
    """
    run = (*TRAIN, "strategy=fsdp", "launch.processes=2")
    calm = finish_ranks(
        4, "train.py", *(word for word in run if "launch" not in word), f"run_dir={tmp_path}/calm"
    )
    assert [rank.code for rank in calm] == [0] * 4, calm
    remote = f"checkpoint.remote=file://{tmp_path}/remote"
    with hosts(2) as pair:
        slow = ("fault=slow", "fault.step=8", "fault.seconds=60")
        with pods(pair, tmp_path / "first", *run, remote, *slow) as programs:
            _wait_for(tmp_path / "remote/checkpoints/step_00000005/manifest.json", programs)
            os.kill(programs[1].ranks()[1], signal.SIGKILL)  # rank 3
            lost = [program.wait() for program in programs]
        again = _ended(pair, tmp_path / "second", *run, remote)
    assert [pod.code for pod in lost] == [1, 1], lost
    assert "rank 3 was ended by SIGKILL" in lost[1].output
    assert [pod.code for pod in again] == [0, 0], again
    assert re.search(r"resumed from .*step_000000(0[5-9]|1\d)", again[0].output), again[0].output
    assert not (tmp_path / "second/pod1/runs/ringmaster/result.json").exists(), "a pod keeps its own files"
    results = [tmp_path / "calm/result.json", tmp_path / "second/pod0/runs/ringmaster/result.json"]
    first, second = (json.loads(path.read_text()) for path in results)
    assert (second["world_size"], second["steps"]) == (4, 15)
    assert first["param_sha256"] == second["param_sha256"]


@pytest.mark.slow
@pytest.mark.netns
def test_a_pod_ends_with_the_status_of_the_run(tmp_path: Path) -> None:
    """0 and 1 are shown above."""
    with hosts(2) as pair:
        mistake = _ended(pair[:1], tmp_path / "mistake", *TRAIN, "train.global_batch_size=2001")
        nan = _ended(pair, tmp_path / "nan", *TRAIN, "optim.lr=1e30")
        with pods(
            pair, tmp_path / "stop", *TRAIN, "train.max_steps=1000000", "train.epochs=1000000"
        ) as programs:
            _wait_for(tmp_path / "stop/pod0/runs/ringmaster/checkpoints/step_00000005", programs)
            programs[1].send_signal(signal.SIGTERM)  # one pod is evicted
            stopped = [program.wait() for program in programs]
    assert [pod.code for pod in mistake] == [2], mistake
    assert "2001" in mistake[0].output
    assert [pod.code for pod in nan] == [3, 3], nan
    assert [pod.code for pod in stopped] == [75, 75], stopped
    assert "stopped by a signal after step" in stopped[0].output
